"""Problems that have images, and policies that see them."""
