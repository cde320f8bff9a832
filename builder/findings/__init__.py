"""What a checkpoint's values tell that its headers do not: dead rows, damaged scales, norms, KV scales, ties.

Nothing here changes what is exported; everything is evidence for a person.
"""

from builder.findings.cache_scales import KvScales, kv_scales
from builder.findings.norms import NormEvidence, norm_evidence, norm_warnings
from builder.findings.scale_tally import ScaleTally, tally_scale
from builder.findings.tying import Ties, max_difference, ties
from builder.findings.values import Values, read_values

__all__ = [
    "KvScales",
    "NormEvidence",
    "ScaleTally",
    "Ties",
    "Values",
    "kv_scales",
    "max_difference",
    "norm_evidence",
    "norm_warnings",
    "read_values",
    "tally_scale",
    "ties",
]
