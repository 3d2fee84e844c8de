package consumer

import "github.com/lapse-orders/lapse/internal/rmq"

// RocketMQ says how to reach RocketMQ: endpoints, TLS (on unless disabled), credentials.
type RocketMQ = rmq.Config

// TLS is the transport security of [RocketMQ].
type TLS = rmq.TLS

// Connection is the membership of one process in a consumer group. It is a [Source].
type Connection = rmq.Consumer

// Delivery is one received message.
type Delivery = rmq.Delivery

var (
	// ErrNotReady is in the chain of the errors of a [Source] that has not connected yet. It is waited out without a warning.
	ErrNotReady = rmq.ErrNotReady
	// ErrHandleExpired is in the chain of the errors of Ack and ChangeInvisible for a message whose invisible time had ended.
	ErrHandleExpired = rmq.ErrHandleExpired
)

// Connect joins a consumer group. It validates and returns at once; the connection is made in the background, and its Ready says what
// is missing. The caller closes it after Run has returned: what was received for nobody goes back to the group then.
func Connect(cfg RocketMQ, group string, topics ...string) (*Connection, error) {
	return rmq.NewConsumer(cfg, group, topics...)
}
