"""Pictures, tables and pages made from files; never imports torch."""
