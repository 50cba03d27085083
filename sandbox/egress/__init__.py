"""What of the network a sandbox reaches: a namespace with a routed veth, filters in the kernel, our resolver.

rules.py a policy as entries of the kernel's maps (pure) · fence.py the programs and maps, over libbpf.py ·
links.py namespaces and veths · messages.py, resolver.py names · service.py all of them, for one process.
"""
