"""Models as the rest of the house sees them: built on the meta device, and their ModelFacts by structure."""
