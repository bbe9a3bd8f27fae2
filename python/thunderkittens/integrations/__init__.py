"""The ops behind the interfaces of other libraries. Nothing here is active until it is called.

`integrations.sdpa` has a drop-in for PyTorch's `scaled_dot_product_attention`,
`integrations.transformers` makes the ops an `attn_implementation` of Hugging Face's transformers,
`integrations.dtensor` tells DTensor how they are sharded.
"""
