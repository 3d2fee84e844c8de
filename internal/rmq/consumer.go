package rmq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

const (
	// More concurrent Receives than any consumer has: the client queues those above
	// its limit, 20 by default (simple_consumer_options.go:37).
	receiveLimit = 1024

	// What a message that was received for nobody is hidden for, before others get
	// it. The server has no minimum; a second is long enough for it to be ours to
	// say and short enough for nobody to notice.
	handBack = time.Second
)

// Delivery is one received message. It is safe for concurrent use.
type Delivery struct {
	MessageID, Topic string
	Body             []byte
	Keys             []string
	// Attempt counts deliveries from 1. After a crash of the broker duplicates come
	// with Attempt 1 again.
	Attempt int
	// DeliverAt is what the sender asked for, also after a redelivery. Zero: not a
	// timed message.
	DeliverAt time.Time
	// BornAt is the sender's clock at the time of the send.
	BornAt time.Time
	// Properties are the sender's.
	Properties map[string]string

	hiddenUntil time.Time // by our clock, as of the receive

	mu   sync.Mutex
	view *golang.MessageView // holds the newest receipt handle
}

// Consumer receives the messages of a group. It is safe for concurrent use. Open
// one per process and topic: a Receive asks one topic at a time, in turn.
type Consumer struct {
	group string
	c     *connector[golang.SimpleConsumer]

	polls  context.Context // ends when Close gives up waiting for them
	cancel context.CancelFunc

	mu      sync.Mutex
	orphans []*poll     // under way, and nobody waits for them
	left    []*Delivery // received for nobody
}

// poll is one Receive of the client. It outlives the caller's context: a long
// poll that is cut off takes along what the server has popped for it, and nobody
// sees that before the invisible time ends.
type poll struct {
	invisible time.Duration
	done      chan struct{} // closed when got and err are set
	got       []*Delivery
	err       error
	orphan    bool // guarded by Consumer.mu
}

// NewConsumer validates and returns at once; it connects in the background until
// it succeeds, and says in Ready what is missing. It subscribes to everything in
// the topics. The error is one of configuration. Close must be called.
func NewConsumer(cfg Config, group string, topics ...string) (*Consumer, error) {
	if group == "" {
		return nil, errors.New("rocketmq consumer: no group")
	}
	build := func(conf *golang.Config, client golang.NewClientFunc) (golang.SimpleConsumer, error) {
		// A tag filter would make the group skip the other messages for good.
		all := make(map[string]*golang.FilterExpression)
		for _, t := range topics {
			all[t] = golang.SUB_ALL
		}
		return golang.NewSimpleConsumer(conf,
			golang.WithClientFuncForSimpleConsumer(client),
			golang.WithSimpleAwaitDuration(awaitDuration),
			golang.WithSimpleReceiveRateLimit(receiveLimit),
			golang.WithSimpleSubscriptionExpressions(all))
	}
	c, err := newConnector(cfg, v2.ClientType_SIMPLE_CONSUMER, group, topics, build)
	if err != nil {
		return nil, fmt.Errorf("rocketmq consumer: %w", err)
	}
	cons := &Consumer{group: group, c: c}
	cons.polls, cons.cancel = context.WithCancel(context.Background())
	return cons, nil
}

// Receive returns up to max messages (at most 32), hidden from others for the
// invisible time (10 s to 12 h). It waits a few seconds for the first one; when
// there is none it returns nil, nil.
//
// An error returns at once, and the next call may too: back off between them.
//
// When ctx ends, Receive returns at once with its error. What the server hands
// over for it afterwards is given to the next Receive, or back to the group by
// Close.
func (c *Consumer) Receive(ctx context.Context, limit int, invisible time.Duration) ([]*Delivery, error) {
	if limit < 1 {
		return nil, fmt.Errorf("receive %d messages: must be at least 1", limit)
	}
	if invisible < minInvisible || invisible > maxInvisible {
		return nil, fmt.Errorf("receive with invisible time %s: must be %s to %s", invisible, minInvisible, maxInvisible)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	limit = min(limit, maxBatch)

	c.mu.Lock()
	if ds := c.takeLeft(limit, invisible); len(ds) > 0 {
		c.mu.Unlock()
		return ds, nil
	}
	p := c.adopt(invisible)
	if p == nil {
		var err error
		if p, err = c.start(limit, invisible); err != nil {
			c.mu.Unlock()
			return nil, err
		}
	}
	c.mu.Unlock()

	select {
	case <-p.done:
	case <-ctx.Done():
		c.abandon(p)
		return nil, ctx.Err()
	case <-c.c.closing:
		c.abandon(p)
		return nil, ErrClosed
	}
	if p.err != nil {
		return nil, fmt.Errorf("receive for group %s: %w", c.group, p.err)
	}
	if len(p.got) > limit { // an adopted poll may have asked for more
		c.mu.Lock()
		c.left = append(c.left, p.got[limit:]...)
		c.mu.Unlock()
		return p.got[:limit], nil
	}
	return p.got, nil
}

// takeLeft returns what was received for nobody and is still hidden for at least
// half of the invisible time; older ones are let go, the server delivers them
// again. It must be called with mu held.
func (c *Consumer) takeLeft(limit int, invisible time.Duration) []*Delivery {
	var out []*Delivery
	for len(c.left) > 0 && len(out) < limit {
		d := c.left[0]
		c.left = c.left[1:]
		if time.Until(d.hiddenUntil) >= invisible/2 {
			out = append(out, d)
		}
	}
	return out
}

// adopt returns a poll that nobody waits for, or nil. It must be called with mu
// held. It bounds the polls by the number of callers, however often those give up.
func (c *Consumer) adopt(invisible time.Duration) *poll {
	for i, p := range c.orphans {
		if p.invisible == invisible {
			c.orphans = append(c.orphans[:i], c.orphans[i+1:]...)
			p.orphan = false
			return p
		}
	}
	return nil
}

// abandon leaves a poll to the next Receive.
func (c *Consumer) abandon(p *poll) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-p.done:
		c.left = append(c.left, p.got...)
	default:
		p.orphan = true
		c.orphans = append(c.orphans, p)
	}
}

// start begins a poll. Its goroutine ends with the poll, at the latest when polls
// ends; shutdown waits for it as a call of the connector.
func (c *Consumer) start(limit int, invisible time.Duration) (*poll, error) {
	client, err := c.c.enter()
	if err != nil {
		return nil, err
	}
	p := &poll{invisible: invisible, done: make(chan struct{})}
	go func() {
		defer c.c.leave()
		got, err := c.receive(client, limit, invisible)
		c.mu.Lock()
		defer c.mu.Unlock()
		p.got, p.err = got, err
		if p.orphan {
			for i, o := range c.orphans {
				if o == p {
					c.orphans = append(c.orphans[:i], c.orphans[i+1:]...)
					break
				}
			}
			c.left = append(c.left, got...)
		}
		close(p.done)
	}()
	return p, nil
}

func (c *Consumer) receive(client golang.SimpleConsumer, limit int, invisible time.Duration) (out []*Delivery, err error) {
	defer recovered("receive", &err)
	views, err := client.Receive(c.polls, int32(limit), invisible) //nolint:gosec // at most 32
	if err != nil {
		err = edge(c.polls, err)
		if code, ok := Code(err); ok && v2.Code(code) == v2.Code_MESSAGE_NOT_FOUND {
			return nil, nil
		}
		return nil, err
	}
	until := time.Now().Add(invisible)
	for _, v := range views {
		d := &Delivery{
			MessageID: v.GetMessageId(), Topic: v.GetTopic(), Body: v.GetBody(), Keys: v.GetKeys(),
			Attempt: int(v.GetDeliveryAttempt()), Properties: v.GetProperties(),
			hiddenUntil: until, view: v,
		}
		if t := v.GetDeliveryTimestamp(); t != nil {
			d.DeliverAt = t.UTC()
		}
		if t := v.GetBornTimestamp(); t != nil {
			d.BornAt = t.UTC()
		}
		out = append(out, d)
	}
	return out, nil
}

// Ack tells the server that d is done. It returns when ctx ends. An error means
// that the message will come again, ErrHandleExpired among them; nil does not
// prove that it will not.
func (c *Consumer) Ack(ctx context.Context, d *Delivery) (err error) {
	client, err := c.c.enter()
	if err != nil {
		return err
	}
	defer c.c.leave()
	return c.withHandle(ctx, "acknowledge", d, func(view *golang.MessageView) error {
		return client.Ack(ctx, view)
	})
}

// ChangeInvisible hides d from others for t from now on, shorter or longer than
// it was: 1 s and more. Later calls with d use the new handle. It returns when ctx
// ends. ErrHandleExpired: the message is others' already.
func (c *Consumer) ChangeInvisible(ctx context.Context, d *Delivery, t time.Duration) error {
	client, err := c.c.enter()
	if err != nil {
		return err
	}
	defer c.c.leave()
	return c.changeInvisible(ctx, client, d, t)
}

func (c *Consumer) changeInvisible(ctx context.Context, client golang.SimpleConsumer, d *Delivery, t time.Duration) error {
	return c.withHandle(ctx, "change the invisible time of", d, func(view *golang.MessageView) error {
		before := view.ReceiptHandle
		err := client.ChangeInvisibleDuration(view, t)
		if view.ReceiptHandle == "" {
			view.ReceiptHandle = before
		}
		return err
	})
}

// withHandle runs one call that uses, and may replace, the handle of d. The call
// ends by the request timeout; when ctx ends before, the caller is not kept
// waiting, but d is, for the next call needs the handle that this one brings.
func (c *Consumer) withHandle(ctx context.Context, what string, d *Delivery, call func(*golang.MessageView) error) error {
	err := ctx.Err()
	if err == nil {
		done := make(chan error, 1)
		c.c.hold()
		go func() {
			defer c.c.leave()
			var err error
			defer func() { done <- err }()
			defer recovered(what, &err)
			d.mu.Lock()
			defer d.mu.Unlock()
			err = call(d.view)
		}()
		select {
		case err = <-done:
			err = edge(ctx, err)
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil {
		return fmt.Errorf("%s message %s of topic %s: %w", what, d.MessageID, d.Topic, err)
	}
	return nil
}

// Ready returns nil when the connection stands, otherwise what is missing, with
// the endpoint, the topic or group and the fix where one is known. It wraps
// ErrNotReady.
func (c *Consumer) Ready() error { return c.c.ready() }

// Close lets the polls under way end, gives back to the group what they brought,
// and ends all connections. When ctx ends first, the polls are cut off: what they
// had popped comes again after its invisible time. A poll takes up to 7 s. A second
// call waits for the first.
func (c *Consumer) Close(ctx context.Context) error {
	stop := context.AfterFunc(ctx, c.cancel)
	defer stop()
	err := c.c.close(ctx, c.giveBack)
	if err == nil {
		c.cancel()
	}
	return err
}

// giveBack makes visible again what was received for nobody.
func (c *Consumer) giveBack(ctx context.Context, client golang.SimpleConsumer) {
	c.mu.Lock()
	left := c.left
	c.left = nil
	c.mu.Unlock()
	var wg sync.WaitGroup
	for _, d := range left {
		wg.Go(func() {
			if err := c.changeInvisible(ctx, client, d, handBack); err != nil {
				c.c.cfg.Logger.Debug("rocketmq message not given back", "err", err)
			}
		})
	}
	wg.Wait()
}
