"""Files: written atomically, kept private, cached, locked, and removed after a killed job."""
