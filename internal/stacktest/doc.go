// Package stacktest gives tests the real servers: the stack that `make test` has brought up, shared by all of them, or one of their own to
// stop and kill.
//
// Tests run in parallel on the shared servers, so what a test touches there is its own: a topic and a group with fresh names, removed when
// it ends.
package stacktest
