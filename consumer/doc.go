// Package consumer receives timed messages and has the orders in them cancelled: broker to truth.
//
// It decides nothing about an order. The broker may ring late, twice, early or never, so a message is taken for no more than a hint to
// ask the database about some ids now, and what is true is said by the conditional update behind [Canceller]. That is why everything
// here may happen twice, and why the one thing that must not happen is a message acknowledged whose orders have no outcome.
//
// # What happens to a message
//
// Receivers take messages while there is room for their orders ([Config.MaxInHand] counts orders, not messages). The orders of several
// messages are gathered and cancelled in one transaction. A message is acknowledged when each of its orders has an outcome that ends
// it: cancelled, already final, exempt, not found or invalid (the store has parked it), or not due for so long that the store has
// written when to ask again. An order that is early by little is asked about again when it is due, alone: nothing waits for it, no
// transaction and no other order.
//
//	the database is down,          no message is received; those in hand are hidden for longer by ChangeInvisible, so that their
//	read-only, out of space        delivery attempts are not used up; work goes on by itself
//	rows are locked by others      each order of the batch is asked about alone, with less time; the locked ones again and again, one
//	                               after the other, beside the rest
//	an error or panic of one       the batch is halved until the order is alone; it fails three times, while others succeed, and is parked
//	order's own
//	every order of a batch fails   taken for the database's trouble: paused and tried again; after [Config.GiveUpAfter] parked all the
//	                               same, for a poisonous order at a quiet hour has no other beside it that could succeed
//	an unreadable message          parked with its body, acknowledged
//	a message of a newer version   hidden for 1 minute, doubling up to 1 hour, never acknowledged: a newer consumer of the group takes
//	                               it. With the 16 retries of the group that we ship this goes on for 12 hours, an upgrade's time;
//	                               then it is a dead letter, and parked as such
//	an acknowledgement fails       counted; the message comes again and finds nothing to do
//
// # Dead letters
//
// The broker gives a message up after the retries of its group, and moves it to the topic %DLQ%<group>, where nobody looks.
// [DeadLetters] does: it counts them, logs the ids of their orders as an error, and parks them.
package consumer
