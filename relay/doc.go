// Package relay turns outbox rows into timed messages: it claims rows under a lease, puts the orders that fall due at the same tick
// into one message, sends it, and marks the rows.
//
// It is built so because placing an order must neither wait for the broker nor fail with it, and must not be forgotten by it: the row
// commits with the order, and whatever happens afterwards (a broker that is down, a relay that is killed, an answer that is lost), the
// row is there until a message was stored for it. A message may therefore be sent twice and never not at all; the conditional update
// behind the consumer makes the second one harmless.
//
// Orders are coalesced per tick because a broker fires its timers on ticks anyway: a message due at a tick is delivered when each of
// its orders would have been delivered alone. Ten ticks a second then bound the number of messages, whatever the number of orders.
//
// # Leases
//
// A claim leases its rows for [Config].Lease under a token of its own, and every mark carries the token: a row whose lease has ended,
// or that was timed anew meanwhile (the deadline was extended), is not matched and will be sent again. A send is started only if it
// can be cut off clearly before the lease ends, so that a slow send never ends under somebody else's lease. Several relays may run:
// they skip each other's rows.
//
// # When something is down
//
// A send that fails in any other way than a refusal of this one message pauses the whole relay, with a growing pause and jitter. What
// is in hand is kept as long as its lease allows, then given back. After the pause one message is sent as a probe, and only when that
// is stored does the relay go on. So an outage of hours costs the rows few attempts, and the outbox drains in its order afterwards.
// While the [Sender] says that it is not ready, or the database cannot be asked, nothing is claimed.
//
// A message that the broker refuses for what it is, is halved until the refused order stands alone; that one is parked with the
// reason, the others are sent.
package relay
