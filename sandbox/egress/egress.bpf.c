/* Egress of sandboxes: socket hooks at the sandbox's cgroup, and a fence at the host end of its veth.
 *
 * Only the kernel's stable interface is used, so the object needs no kernel headers of the host and no
 * relocation; libbpf loads it (fence.py). What is in no map is refused: a sandbox of which nothing has been
 * entered reaches its own loopback and nothing else. What a sandbox's rules allow must not be denied by the
 * node, whose denials nothing overrides.
 *
 * Addresses are 16 bytes in network order, version 4 as ::ffff:a.b.c.d; NAT64 forms are turned into that. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

enum { MAX_RANGES = 8, MAX_ENTRIES = 1 << 18, MAX_SANDBOXES = 16384, LOG_BYTES = 1 << 18 };
enum { MOST_EVENTS = 256, WINDOW_NS = 100000000 };
enum { STREAM = 1, DATAGRAM = 2, TCP = 6, UDP = 17, FRAGMENT = 44, LOOPBACK = 1 };
/* What was tried; fence.py has the same numbers. */
enum hook { CONNECT = 1, SEND = 2, BIND = 3, SOCKET = 4, PACKET = 5, WIRE = 6 };

struct address {
    __u32 word[4];
};

struct range {
    __u64 until_ns; /* 0 = for ever; after it nothing new begins, and what has begun goes on */
    __u16 first, last;
    __u8 protocol; /* 0 = any */
    __u8 unused[3];
};

struct entry {
    __u32 count;
    __u32 clear; /* the node denies nothing of it, so there is no need to look */
    struct range ranges[MAX_RANGES];
};

struct allow_key {
    __u32 length; /* bits */
    __u32 sandbox[2];
    __u32 generation;
    struct address address;
};

struct deny_key {
    __u32 length;
    struct address address;
};

/* Which rules hold: those of this generation, so that new ones take effect as a whole. All zero: none. */
struct identity {
    __u64 sandbox; /* id of the cgroup that the programs are attached to */
    __u32 generation, unused;
};

/* At most MOST_EVENTS are logged in WINDOW_NS: a sandbox that tries without end is not to keep the host busy. */
struct counters {
    __u64 denied, unlogged, window_ns, in_window;
};

/* Where packets from the host end of a veth may come from, and where those of version 6 go on from. */
struct home {
    struct address addresses[2];
    __u32 trunk, unused; /* 0: from the host end itself */
};

struct event {
    __u64 sandbox;
    struct address address;
    __u16 port; /* of a socket refused: its type */
    __u8 protocol, hook;
    __u32 unused;
};

struct {
    __uint(type, BPF_MAP_TYPE_LPM_TRIE);
    __uint(max_entries, MAX_ENTRIES);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct allow_key);
    __type(value, struct entry);
} allowed SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_LPM_TRIE);
    __uint(max_entries, 4096);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct deny_key);
    __type(value, struct entry);
} denied SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_SANDBOXES);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u64);
    __type(value, struct counters);
} counts SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_SANDBOXES);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u32); /* ifindex of the host end */
    __type(value, struct identity);
} links SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_SANDBOXES);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u32);
    __type(value, struct home);
} homes SEC(".maps");

/* The host end that a sandbox's address of version 6 lies behind, by ifindex. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, MAX_SANDBOXES);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct address);
    __type(value, __u32);
} ends SEC(".maps");

/* Of the cgroup that a program is attached to, for processes in groups below it as well. */
struct {
    __uint(type, BPF_MAP_TYPE_CGROUP_STORAGE);
    __type(key, __u64);
    __type(value, struct identity);
} attached SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, LOG_BYTES);
} events SEC(".maps");

/* Not where a user writes them for whom the helper has loaded this: what entries say of denials is then not taken. */
__u32 entries_are_ours;

static __always_inline struct address mapped(__u32 version4) {
    return (struct address){{0, 0, bpf_htonl(0xffff), version4}};
}

static __always_inline struct address plain(struct address address) {
    if (address.word[0] == bpf_htonl(0x0064ff9b) && !address.word[1] && !address.word[2])
        return mapped(address.word[3]);
    return address;
}

/* Own loopback, and "any", which the kernel takes for it. */
static __always_inline bool is_local(struct address a) {
    if (a.word[0] || a.word[1]) return false;
    if (a.word[2] == bpf_htonl(0xffff)) return (bpf_ntohl(a.word[3]) >> 24) == 127 || !a.word[3];
    return !a.word[2] && (!a.word[3] || a.word[3] == bpf_htonl(1));
}

static __always_inline bool matches(const struct entry *entry, __u16 port, __u8 protocol, bool begins) {
    for (__u32 i = 0; i < MAX_RANGES; i++) {
        const struct range *range = &entry->ranges[i];
        if (i >= entry->count) break;
        if (range->protocol && range->protocol != protocol) continue;
        if (port < range->first || port > range->last) continue;
        if (!range->until_ns || !begins || bpf_ktime_get_ns() < range->until_ns) return true;
    }
    return false;
}

static __always_inline bool has_room(struct counters *counters) {
    __u64 now = bpf_ktime_get_ns();
    if (now - counters->window_ns > WINDOW_NS) {
        counters->window_ns = now;
        counters->in_window = 0;
    }
    return __sync_fetch_and_add(&counters->in_window, 1) < MOST_EVENTS;
}

static __always_inline void log(__u64 sandbox, struct address address, __u16 port, __u8 protocol, enum hook hook) {
    struct counters *counters = bpf_map_lookup_elem(&counts, &sandbox);
    if (!counters) return;
    __sync_fetch_and_add(&counters->denied, 1);
    struct event *event = has_room(counters) ? bpf_ringbuf_reserve(&events, sizeof *event, 0) : NULL;
    if (!event) {
        __sync_fetch_and_add(&counters->unlogged, 1);
        return;
    }
    event->sandbox = sandbox;
    event->address = address;
    event->port = port;
    event->protocol = protocol;
    event->hook = hook;
    event->unused = 0;
    bpf_ringbuf_submit(event, 0);
}

/* The sandbox's entry for an address; none where the node denies it. */
static __always_inline const struct entry *find(const struct identity *who, struct address address, __u16 port,
                                                __u8 protocol) {
    if (!who->generation) return NULL;
    struct allow_key key = {.length = 224, .generation = who->generation, .address = address};
    __builtin_memcpy(key.sandbox, &who->sandbox, sizeof key.sandbox);
    const struct entry *entry = bpf_map_lookup_elem(&allowed, &key);
    if (!entry || (entry->clear && entries_are_ours)) return entry;
    struct deny_key deny_key = {.length = 128, .address = address};
    const struct entry *deny = bpf_map_lookup_elem(&denied, &deny_key);
    return deny && matches(deny, port, protocol, false) ? NULL : entry;
}

/* `begins`: a connection or a first datagram, for which an answer of the resolver must still hold. */
static __always_inline bool is_allowed(const struct identity *who, struct address address, __u16 port,
                                       __u8 protocol, bool begins) {
    const struct entry *entry = find(who, address, port, protocol);
    return entry && matches(entry, port, protocol, begins);
}

static __always_inline int judge(struct address address, __u16 port, __u8 protocol, enum hook hook) {
    const struct identity *who = bpf_get_local_storage(&attached, 0);
    address = plain(address);
    if (is_local(address)) return 1;
    if (is_allowed(who, address, port, protocol, true)) return 1;
    log(who->sandbox, address, port, protocol, hook);
    return 0;
}

static __always_inline struct address sixth(struct bpf_sock_addr *ctx) {
    return (struct address){{ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]}};
}

static __always_inline __u16 port_of(struct bpf_sock_addr *ctx) { return bpf_ntohs((__u16)ctx->user_port); }

SEC("cgroup/connect4") int connect4(struct bpf_sock_addr *ctx) {
    return judge(mapped(ctx->user_ip4), port_of(ctx), ctx->protocol, CONNECT);
}

SEC("cgroup/connect6") int connect6(struct bpf_sock_addr *ctx) {
    return judge(sixth(ctx), port_of(ctx), ctx->protocol, CONNECT);
}

SEC("cgroup/sendmsg4") int sendmsg4(struct bpf_sock_addr *ctx) {
    return judge(mapped(ctx->user_ip4), port_of(ctx), ctx->protocol, SEND);
}

SEC("cgroup/sendmsg6") int sendmsg6(struct bpf_sock_addr *ctx) {
    return judge(sixth(ctx), port_of(ctx), ctx->protocol, SEND);
}

/* Servers are for the sandbox itself: what would answer from another of its addresses has no way out. */
static __always_inline int judge_bind(struct bpf_sock_addr *ctx, struct address address) {
    const struct identity *who = bpf_get_local_storage(&attached, 0);
    if (is_local(address)) return 1;
    log(who->sandbox, address, port_of(ctx), ctx->protocol, BIND);
    return 0;
}

SEC("cgroup/bind4") int bind4(struct bpf_sock_addr *ctx) { return judge_bind(ctx, mapped(ctx->user_ip4)); }

SEC("cgroup/bind6") int bind6(struct bpf_sock_addr *ctx) { return judge_bind(ctx, sixth(ctx)); }

/* TCP and UDP as they are: no raw sockets, no ping, no SCTP, no MPTCP. */
SEC("cgroup/sock_create") int sock_create(struct bpf_sock *ctx) {
    if (ctx->type == STREAM && ctx->protocol == TCP) return 1;
    if (ctx->type == DATAGRAM && ctx->protocol == UDP) return 1;
    const struct identity *who = bpf_get_local_storage(&attached, 0);
    log(who->sandbox, (struct address){{0}}, ctx->type, (__u8)ctx->protocol, SOCKET);
    return 0;
}

struct packet {
    struct address from, to;
    __u16 port;
    __u8 protocol;
    bool rest; /* of a fragmented one: the first part had the port */
};

static __always_inline __u16 two(const __u8 *bytes) { return (__u16)(bytes[0] << 8 | bytes[1]); }

/* Header and ports at once, where there are both: the last part of a fragmented packet may be shorter. */
static __always_inline bool read_version4(struct __sk_buff *skb, __u32 at, struct packet *packet) {
    __u8 header[24] = {0};
    __u32 from, to;
    if (bpf_skb_load_bytes(skb, at, header, 24) && bpf_skb_load_bytes(skb, at, header, 20)) return false;
    if (header[0] != 0x45) return false; /* no options: they could name a way round */
    __builtin_memcpy(&from, header + 12, sizeof from);
    __builtin_memcpy(&to, header + 16, sizeof to);
    packet->from = mapped(from);
    packet->to = mapped(to);
    packet->protocol = header[9];
    packet->rest = (header[6] & 0x1f) || header[7];
    packet->port = two(header + 22);
    return true;
}

static __always_inline bool read_version6(struct __sk_buff *skb, __u32 at, struct packet *packet) {
    __u8 header[44] = {0}, fragment[12] = {0};
    if (bpf_skb_load_bytes(skb, at, header, 44)) return false;
    __builtin_memcpy(&packet->from, header + 8, sizeof packet->from);
    __builtin_memcpy(&packet->to, header + 24, sizeof packet->to);
    packet->protocol = header[6];
    packet->port = two(header + 42);
    if (packet->protocol != FRAGMENT) return true;
    at += 40;
    if (bpf_skb_load_bytes(skb, at, fragment, 12) && bpf_skb_load_bytes(skb, at, fragment, 8)) return false;
    packet->protocol = fragment[0];
    packet->rest = fragment[2] || (fragment[3] & 0xf8);
    packet->port = two(fragment + 10);
    return true;
}

/* False: not TCP or UDP over plain IP, or cut short. A port that is not there is 0, which no rule has. */
static __always_inline bool read_packet(struct __sk_buff *skb, __u32 at, struct packet *packet) {
    if (skb->protocol == bpf_htons(ETH_P_IP)) {
        if (!read_version4(skb, at, packet)) return false;
    } else if (skb->protocol != bpf_htons(ETH_P_IPV6) || !read_version6(skb, at, packet)) {
        return false;
    }
    packet->to = plain(packet->to);
    return packet->protocol == TCP || packet->protocol == UDP;
}

/* The rest of a fragmented packet goes where anything may go: without its first part it is nothing. */
static __always_inline bool may_pass(const struct identity *who, const struct packet *packet) {
    if (!packet->rest) return is_allowed(who, packet->to, packet->port, packet->protocol, false);
    const struct entry *entry = find(who, packet->to, 0, packet->protocol);
    return entry && entry->count;
}

/* Datagrams of connected sockets, so that their senders hear of a cut at once. TCP is left to the wire: its
 * sender would not hear of it here either. */
SEC("cgroup_skb/egress") int egress(struct __sk_buff *skb) {
    const struct identity *who = bpf_get_local_storage(&attached, 0);
    struct packet packet = {0};
    __u8 protocol = 0;
    if (skb->ifindex == LOOPBACK) return 1;
    bpf_skb_load_bytes(skb, skb->protocol == bpf_htons(ETH_P_IP) ? 9 : 6, &protocol, sizeof protocol);
    if (protocol == TCP) return 1;
    if (!read_packet(skb, 0, &packet)) return 0;
    if (may_pass(who, &packet)) return 1;
    log(who->sandbox, packet.to, packet.port, packet.protocol, PACKET);
    return 0;
}

static __always_inline bool same(const struct address *a, const struct address *b) {
    return !((a->word[0] ^ b->word[0]) | (a->word[1] ^ b->word[1]) | (a->word[2] ^ b->word[2]) |
             (a->word[3] ^ b->word[3]));
}

/* Everything that leaves, whatever kind of socket or part of the kernel sent it. */
SEC("tc") int wire(struct __sk_buff *skb) {
    __u32 ifindex = skb->ifindex;
    struct packet packet = {0};
    const struct identity *who = bpf_map_lookup_elem(&links, &ifindex);
    const struct home *home = bpf_map_lookup_elem(&homes, &ifindex);
    if (!who || !home || skb->vlan_present || !read_packet(skb, ETH_HLEN, &packet)) return TC_ACT_SHOT;
    bool own = same(&packet.from, &home->addresses[0]) || same(&packet.from, &home->addresses[1]);
    if (own && may_pass(who, &packet)) {
        bool by_trunk = home->trunk && skb->protocol == bpf_htons(ETH_P_IPV6);
        return by_trunk ? bpf_redirect(home->trunk, BPF_F_INGRESS) : TC_ACT_OK;
    }
    log(who->sandbox, packet.to, packet.port, packet.protocol, WIRE);
    return TC_ACT_SHOT;
}

/* At the trunk, which has the routes of version 6 to all sandboxes: what is to leave there goes to the host end
 * that it is for, and what is for nobody goes nowhere. */
SEC("tc") int deliver(struct __sk_buff *skb) {
    struct address to = {0};
    if (skb->protocol != bpf_htons(ETH_P_IPV6)) return TC_ACT_SHOT;
    if (bpf_skb_load_bytes(skb, ETH_HLEN + 24, &to, sizeof to)) return TC_ACT_SHOT;
    const __u32 *end = bpf_map_lookup_elem(&ends, &to);
    return end ? bpf_redirect(*end, 0) : TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
