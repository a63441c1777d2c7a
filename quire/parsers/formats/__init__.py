"""The formats, one file per family. A file is data only; the machine that reads it is next door."""
