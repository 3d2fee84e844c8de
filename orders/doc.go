// Package orders is the truth of lapse: the orders, their money, their stock, and the rows that say which timed messages must
// still be sent.
//
// The rule "cancel only if unpaid and due" lives in the WHERE clause of a conditional update, not in Go: two processes that both
// read "unpaid" would both cancel. An interface between the rule and its rows would tear it in two, so this package owns both.
//
// Each verb exists twice. [Store.Place] opens its own transaction at READ COMMITTED, retries deadlocks, and commits. [Store.PlaceTx]
// joins the caller's transaction, whatever its isolation level is, and never commits: it runs inside a savepoint, so an error leaves
// nothing behind, except a deadlock (1213), after which MySQL has already rolled back the whole transaction and the caller starts
// again (see [IsRetryable]).
//
// Every transaction asks the database for the time once, with UTC_TIMESTAMP(3), and uses that instant throughout. The clock and the
// time zone of the process and of the session do not matter.
//
// Locks are taken in one order by every verb: orders by id, payments, ledger, outbox, events, and stock last, by SKU.
//
// This package knows no RocketMQ: checkout code imports it, and a checkout needs a database client, nothing else.
package orders
