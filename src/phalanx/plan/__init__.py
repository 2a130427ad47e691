"""What follows from a job: layout, memory, reasons. Torch-free."""
