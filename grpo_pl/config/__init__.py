"""From YAML to objects, in every verb and the server alike."""
