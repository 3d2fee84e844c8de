// Package lapse is the root of a system that cancels orders which are still unpaid at their deadline: on time, exactly once, and with a
// proof. It holds no code; it exists so that the tests of what belongs to the whole repository have a place: that the README's commands
// and snippets work, and that every known fault of such systems has a test or a stated reason why not.
//
// Checkout code imports package producer. The binary is cmd/lapse. Shops that run the loops in their own processes import relay and
// consumer; shops that test against them import lapsetest.
package lapse
