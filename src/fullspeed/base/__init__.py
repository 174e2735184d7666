"""The floor of the house: errors, logging, environment, flat layouts. Imports nothing of FullSpeed and no torch."""
