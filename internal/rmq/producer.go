package rmq

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// The broker's limit; the client refuses more by itself, without a code.
const maxBody = 4 << 20

// Message is what a Producer sends.
type Message struct {
	Topic string
	// Body is 1 byte to 4 MiB. Keep it small: see the relay's limit.
	Body []byte
	// Keys find the message in the broker's index. Without blanks inside.
	Keys []string
	// DeliverAt is the instant before which the broker delivers nothing; rounded up
	// to a millisecond. In the past: at once. Zero: a message of a NORMAL topic.
	DeliverAt time.Time
	// Properties travel with the message, such as traceparent.
	Properties map[string]string
}

// Producer sends messages to the topics that it was opened for. It is safe for
// concurrent use. Open one per process.
type Producer struct {
	c *connector[golang.Producer]
}

// NewProducer validates and returns at once; it connects in the background until
// it succeeds, and says in Ready what is missing. The error is one of
// configuration. Close must be called.
func NewProducer(cfg Config, topics ...string) (*Producer, error) {
	build := func(conf *golang.Config, client golang.NewClientFunc) (golang.Producer, error) {
		return golang.NewProducer(conf,
			golang.WithClientFunc(client),
			golang.WithTopics(topics...),
			// One attempt: a repetition at once meets the same server, multiplies the
			// copies of a message whose answer was lost, and outlasts the lease of the
			// relay, which repeats with a pause.
			golang.WithMaxAttempts(1))
	}
	c, err := newConnector(cfg, v2.ClientType_PRODUCER, "", topics, build)
	if err != nil {
		return nil, fmt.Errorf("rocketmq producer: %w", err)
	}
	return &Producer{c: c}, nil
}

// Send stores m at the broker and returns its message id. It returns when ctx
// ends, and after the request timeout at the latest.
//
// An error means that the message may or may not have been stored; only
// IsRefusedMessage is certain. ErrNotReady: no connection was made yet.
func (p *Producer) Send(ctx context.Context, m Message) (messageID string, err error) {
	client, err := p.c.enter()
	if err != nil {
		return "", err
	}
	defer p.c.leave()
	defer func() {
		if err != nil {
			err = fmt.Errorf("send to topic %s: %w", m.Topic, err)
		}
	}()
	defer recovered("send", &err)
	if err := ctx.Err(); err != nil {
		return "", err
	}
	msg, err := p.message(m)
	if err != nil {
		return "", err
	}
	receipts, err := client.Send(ctx, msg)
	if err != nil {
		return "", edge(ctx, err)
	}
	if len(receipts) == 0 {
		return "", fmt.Errorf("the server accepted the message without a receipt")
	}
	return receipts[0].MessageID, nil
}

// message checks what the client would refuse without a code, or not at all.
func (p *Producer) message(m Message) (*golang.Message, error) {
	if !slices.Contains(p.c.topics, m.Topic) {
		// The client would ask for its route under way, and announce it to the server.
		return nil, fmt.Errorf("the producer was not opened for this topic")
	}
	if len(m.Body) > maxBody {
		return nil, &StatusError{Code: int32(v2.Code_MESSAGE_BODY_TOO_LARGE), Message: fmt.Sprintf("body of %d bytes, at most %d", len(m.Body), maxBody)}
	}
	for _, k := range m.Keys {
		if k == "" || strings.ContainsAny(k, " \t\r\n") {
			// Keys are joined and split by blanks on the way.
			return nil, &StatusError{Code: int32(v2.Code_ILLEGAL_MESSAGE_KEY), Message: fmt.Sprintf("key %q: empty or with a blank inside", k)}
		}
	}
	kind := v2.MessageType_NORMAL
	msg := &golang.Message{Topic: m.Topic, Body: m.Body}
	if !m.DeliverAt.IsZero() {
		kind = v2.MessageType_DELAY
		msg.SetDelayTimestamp(ceilMilli(m.DeliverAt))
	}
	if types := p.c.link.accepts(m.Topic); !slices.Contains(types, kind) {
		return nil, &StatusError{Code: int32(v2.Code_MESSAGE_PROPERTY_CONFLICT_WITH_TYPE), Message: fmt.Sprintf("the topic takes %s, the message is %s", typeNames(types), kind)}
	}
	msg.SetKeys(m.Keys...)
	for k, v := range m.Properties {
		msg.AddProperty(k, v)
	}
	return msg, nil
}

// ceilMilli rounds up, since the broker cuts off: cut off, a message would be
// early by up to a millisecond.
func ceilMilli(t time.Time) time.Time {
	t = t.UTC()
	if cut := t.Truncate(time.Millisecond); !cut.Equal(t) {
		return cut.Add(time.Millisecond)
	}
	return t
}

// Ready returns nil when the connection stands, otherwise what is missing, with
// the endpoint, the topic and the fix where one is known. It wraps ErrNotReady.
func (p *Producer) Ready() error { return p.c.ready() }

// Close waits for the sends under way until ctx ends, and ends all connections.
// A second call waits for the first.
func (p *Producer) Close(ctx context.Context) error { return p.c.close(ctx, nil) }
