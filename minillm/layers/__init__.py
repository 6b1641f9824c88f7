"""The layers of a transformer, written in the operations of a backend.

The letters of every shape comment in minillm; each line that changes a shape ends with one:

    q = partition_heads(q, H)  # [T, E] -> [T, H, D]

N  sequences in the batch
T  new tokens of all sequences, concatenated (ragged, never padded)
R  rows of logits computed: the last token of each sequence, or all tokens
S  context length of one sequence: cached and new positions
E  model width (hidden_size)
W  width of the token embedding and of the LM head's input (E except in opt-350m)
H  query heads
K  key/value heads (K = H without grouped-query attention)
D  width of one head
F  width of the MLP's hidden layer, or of an expert's
X  experts of a layer; each token uses k
V  vocabulary size
L  layers
P  positions in one page of the K/V cache

The lecture's L (length) is our T and S, its D our E, its H our D, its n_H our H.
"""
