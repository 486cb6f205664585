"""The only way of weights from the learner to the engines: quantized once, at the sender, and verified in the engines.

rank          sender     begin ─► put, bucket by bucket ─► commit       stream      tensors, buckets, manifest
coordinator   gate       has engines load and verify, quarantines      transports  how the bytes travel
engine        receiver   begin ─► put ─► commit                        floor       usual gaps of probes
"""
