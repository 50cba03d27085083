"""What no program in a sandbox may ask of the kernel, refused by programs of ours at its security hooks (BPF
LSM), one set for all sandboxes of a process."""
