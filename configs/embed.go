package configs

import _ "embed"

// Default is configs/default.yaml: every key with its meaning and its default.
//
//go:embed default.yaml
var Default []byte
