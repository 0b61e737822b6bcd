"""Names of the files of a comparison, in its folder."""

RESULT, PICTURE, REPORT = "compare.json", "compare.png", "report.html"
