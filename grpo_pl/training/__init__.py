"""One training step, stage by stage, and the LightningModule that wires the stages."""
