"""Claim: CoCoDC needs 21.0 % fewer steps than Streaming DiLoCo to a target perplexity.

    python -m experiments compare --config=configs/paper/cocodc_steps.py --workdir=runs/cocodc_steps

Paper: arXiv 2504.17672 (150M parameters on C4, four regions). The study, its sizes and what we
measured are in configs/compare/cocodc_vs_streaming.py and docs/RESULTS.md.
"""

from configs.compare.cocodc_vs_streaming import get_config

__all__ = ["get_config"]
