// Package configs carries default.yaml inside the binary.
//
// It is embedded, and not only shipped, because it is loaded before every other source: a key that is not in it is unknown, so the
// documentation of the configuration cannot lag behind the configuration. The server configurations beside it are for the stack.
package configs
