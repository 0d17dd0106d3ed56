"""Tests on QEMU's NVMe controller: a device model that others wrote, in a disposable guest."""
