"""The store against fio and a file per object, in paired rounds."""
