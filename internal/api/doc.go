// Package api is the way in for shops that are not written in Go: orders are placed, paid, extended, cancelled and read over HTTP, with
// JSON, as openapi.yaml says, which the server gives out itself.
//
// It is a thin layer over package orders and decides nothing about orders: what it adds is what a network in between makes necessary. A
// client that does not know whether its request arrived sends it again with the same Idempotency-Key, which commits with the order.
// Numbers that a client's floating point would break, ids and amounts, are strings. Whatever can be a slip (an unknown member, a member
// twice, a null) is refused, since what is ignored today would be an order with another deadline than its shop believes. Every error is a
// problem of RFC 9457 with a type that does not change.
//
// The process's clock is used for one thing only: how old the signature of a payment notice is. Deadlines are the database's business.
package api
