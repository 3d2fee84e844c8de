// Package trial runs lapse against a shop that it plays itself, and checks afterwards that the database agrees with what the shop was
// told.
//
// An audit of the tables alone cannot see what is missing from them: an order that was acknowledged to the checkout and is not there, money
// that was taken and left no row. So the load generator keeps a ledger of every answer that it got, and the trial compares the two.
//
// The parts: [Draw] makes the customers, from a seed alone; [Shop] lets them place orders and act on them through the producer, and writes
// the [Ledger]; [ReadRows] reads what the database has about the orders of one run, and [Compare] holds it against the ledger;
// [orders.Audit] checks the invariants; [Report] is the result. [Demo] ties them together with real processes of the binary.
package trial
