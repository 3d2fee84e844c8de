// Package lapsetest is an embedded RocketMQ 5 endpoint for tests: it listens on
// a loopback port, speaks the real gRPC protocol, and is driven by the official
// client's Producer and SimpleConsumer as a real proxy would be.
//
// It exists because the faults that matter to a system of timed messages cannot
// be produced on demand by a real broker: an answer lost after the message was
// stored, a proxy that forgets its clients, a half-open connection, a message
// delivered twice with attempt 1, half an hour that passes in a millisecond. And
// it is a server rather than a mock because the client has hazards of its own,
// which only show on the wire.
//
//	b := lapsetest.Start(t)
//	b.CreateTopic("order-timeout", lapsetest.Delay, 8)
//	b.CreateGroup("order-timeout-cg", 16)
//	// … point the code under test at b.Endpoint() …
//
// # What it keeps of the real one
//
// The rules are those measured on RocketMQ 5.5.0: a deadline is rounded up to the
// next multiple of the timer's precision and never fires before it; one in the past
// fires at once; one beyond the maximal delay is refused with 40012. A received
// message is hidden for its invisible duration and comes again with its attempt
// raised; after the group's retries plus one deliveries the next Receive moves it
// to the dead-letter topic %DLQ%<group>, which exists from then on. A dead letter
// brings its attempts along, so that a group of N retries needs a reader of N+2 or
// more. An acknowledgement with a handle that was replaced answers OK and does
// nothing; to change an invisible duration with one makes the message come twice.
// Sizes, reserved names and the codes of refusals are the real ones too. A conformance
// suite holds this server and a real broker to the same expectations.
//
// # What it leaves out
//
// PushConsumer, transactions, message groups, SQL filters, lite topics and several
// brokers. Everything is kept in memory for the life of the Broker, so that a test
// may look at it.
//
// # Control
//
// [Broker.Control] is the general tool: a function that sees a request before the
// server does, and may observe, delay, refuse or answer it. On top of it there are
// [Broker.FailNext] and [Broker.LoseNext]; for the connection [Broker.Freeze],
// [Broker.HalfOpen], [Broker.Stop] and [Broker.Restart]; for time a [Clock], or
// [Broker.SetSkew]; for what no client can do [Broker.Duplicate] and [Broker.Inject].
//
// A Broker and a Clock are safe for concurrent use.
package lapsetest
