"""Tests on QEMU's NVMe controller: a device model that nobody here wrote, in a disposable guest."""
