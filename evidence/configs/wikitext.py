"""The claims between methods again, on another corpus and in larger tokens.

    python -m evidence campaign --config=evidence/configs/wikitext.py --plan
    python -m evidence campaign --config=evidence/configs/wikitext.py
    python -m evidence --config=evidence/configs/wikitext.py

What holds on Python sources in bytes may not hold elsewhere. This is WikiText-2 (arXiv 1609.07843,
CC BY-SA) in 1,024 tokens of a byte-level BPE that is trained on it. Methods, tuning and tests are
those of `scale.py`. The folder `wikitext-2` holds the two files that `origin` names, 2.4 MB, and
nothing else; another place is `--config.common.data.corpus=text:FOLDER`.

The training part is left out: of the other two, 24 rounds see about half, and 96 see all twice.
Stages: `1_small`: 0.23M parameters, 24 and 96 rounds, in 4 regions; `2_seeds`: five seeds of them;
`3_large`: 0.78M.
"""

from ml_collections import ConfigDict

from evidence.campaign.config import campaign, size, stage
from evidence.configs import scale


def get_config() -> ConfigDict:
    """Give the config."""
    return campaign(
        title="Evidence: what papers claim, on WikiText-2",
        records="evidence/records/wikitext",
        page="wikitext",
        text="WikiText-2",
        origin=(
            "Validation and test part of WikiText-2 (arXiv 1609.07843, CC BY-SA) as PyTorch's "
            "examples ship them, word_language_model/data/wikitext-2, in a folder `wikitext-2`; "
            "another place is `--config.common.data.corpus=text:FOLDER`. The BPE is trained on all "
            "of it, held-out documents included. SHA-256: `valid.txt` "
            "`f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8`, `test.txt` "
            "`d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0`. "
            f"{scale.EARLIER}"
        ),
        see=(
            "Of WikiText-2 these are the validation and test part alone: 24 rounds see about half "
            "of what is not held out, and 96 see all of it twice. "
            "With more scales, and on settings of methods: [Python sources](scale.md)."
        ),
        beside="evidence/configs/scale.py",
        common=scale.common(corpus="text:wikitext-2", tokenizer="bpe:1024"),
        sizes={
            "230k": size(0.23e6, 8, **scale.narrow(64)),
            "780k": size(0.78e6, 8, **scale.narrow(128)),
        },
        arms=scale.arms(),
        claims={name: {**claim, "stages": {}} for name, claim in scale.claims().items()},
        stages={
            "1_small": stage(sizes=("230k",), rounds=(24, 96), regions=(4,)),
            "2_seeds": stage(("230k",), (24, 96), (4,), seeds=scale.FIVE),
            "3_large": stage(sizes=("780k",), rounds=(24, 96), regions=(4,)),
        },
        tuning=scale.TUNING,
    )
