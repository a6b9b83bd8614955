"""From a plan to the model, its optimizer and their place in the mesh."""
