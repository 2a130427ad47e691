"""The search for layouts: what a job leaves open, screened by the thousand and planned exactly."""
