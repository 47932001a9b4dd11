"""What a plain run never imports: one folder a capability, reached by class paths, verbs and default callbacks."""
