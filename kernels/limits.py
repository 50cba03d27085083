"""Numbers that the C kernels have from their build; without torch, for commands that only ask for them."""

# Llama's and DeepSeek's released widths are below.
BLOCK = 32  # weights that share a scale: columns of a product are a multiple
MAX_COLUMNS = 1 << 16  # of one product of weights that are not packed
MAX_HEAD = 512  # channels of a head of `paged_attention`
MAX_STREAMS = 8  # of hyper-connections
MAX_THREADS = 1024  # of one call
