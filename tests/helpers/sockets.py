"""Addresses on which processes listen."""

import ipaddress
import os
import socket


def find_addresses(*processes):
    """Return the addresses, without ports, of the TCP sockets of processes that listen, and of their UDP sockets."""
    inodes = {inode for process in processes for inode in _sockets_of(process)}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/net/{table}") as lines:
            rows = [line.split() for line in list(lines)[1:]]
        listens = "0A" if table.startswith("tcp") else "07"
        found |= {_address(row[1]) for row in rows if row[9] in inodes and row[3] == listens}
    return found


def _sockets_of(process):
    folder = f"/proc/{process}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target.removeprefix("socket:[").removesuffix("]")


def _address(text):
    """Decode an address of /proc/net: words of 4 bytes, each in the byte order of the host."""
    words = bytes.fromhex(text.partition(":")[0])
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def filter_reachable(addresses):
    """Return the addresses that other hosts may reach."""
    return {each for each in addresses if not ipaddress.ip_address(each.removeprefix("::ffff:")).is_loopback}
