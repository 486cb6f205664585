"""The only way of weights from the learner to the engines: quantized once, at the sender, and verified in the engines.

    rank ─ sender ─► transport ─► gate ─ coordinator ─► fleet ─► receiver ─ engine
             begin, put for each bucket, commit             load, verify, draw the probe

`stream` makes buckets and manifests of tensors, `messages` go to the gate, `floor` knows the usual gaps of probes, and
`local` is the same way within one process.
"""
