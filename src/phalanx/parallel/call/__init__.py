"""What goes into a module and its objective and comes out, checked and bound by name."""
