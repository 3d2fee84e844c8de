// Package rmq is the RocketMQ 5 client of lapse: a Producer of timed messages
// and a Consumer of a group, on the official Go client v5.1.4.
//
// The official client is sound on a good network and helpless on a bad one: it
// dials for five seconds under a lock, waits for ever in Start, does not notice
// a restarted proxy for minutes, reports refused acknowledgements as done, and
// writes every message into a log file in the temporary directory. None of this
// can be configured. This package keeps its protocol and replaces its
// connections, so that what remains can be relied on:
//
//   - Constructors only validate. Connecting goes on in the background, with
//     backoff, until the servers, topics and groups exist; Ready says what is
//     missing and how to put it right.
//   - No call outlasts its context.
//   - A restarted proxy is used again within seconds, a connection that has died
//     without a word is replaced.
//   - A refused Ack or ChangeInvisible is an error, with the code of the server.
//   - TLS is on and the certificate is verified, unless configured otherwise.
//   - Nothing is written to the home or the temporary directory, and no message
//     body is logged.
//
// # What the official client leaves behind
//
// Each Producer and each Consumer starts four tickers of the official client
// (heartbeat, idle check, statistics, settings; client_manager.go:103-125) that
// have no way to be stopped. They are goroutines without a connection, and a
// Close leaves exactly these four. Open one Producer and one Consumer per
// process, for its life.
//
// # Races of the official client
//
// Five unsynchronised accesses are known in v5.1.4. None can happen here, which
// is why the tests of this package run under the race detector without an
// exclusion:
//
//   - the retry policy, written by a settings reply while Send reads it
//     (producer_options.go:155), and the meter, replaced by a settings reply
//     while every call reads it (metric.go:354): both are cut out of the reply
//     before the client sees it;
//   - the start-up error, written by the telemetry loop while Start polls it
//     (client.go:123): the telemetry loop never sees an error during Start;
//   - the meter again, replaced by GracefulStop: it is called when no other call
//     is under way;
//   - the host's name, cached by the first client (utils.go:177): it is asked for
//     before there is one.
package rmq
