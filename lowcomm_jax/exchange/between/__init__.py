"""Exchange between independent jobs: `remote` is its face, `connect` makes it, `gathering` and
`fetch` run one exchange, `joining` and `beats` say who is there, the rest they stand on."""
