package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lapse-orders/lapse/orders"
)

// DeadLetterTopic is where the broker moves the messages of a group that it has given up. It exists from the first one on.
func DeadLetterTopic(group string) string { return "%DLQ%" + group }

// DeadLetterGroup is the group with which [DeadLetters] reads the dead letters of a group: one of its own, so that a subscription to
// two topics does not differ between the versions of the consumer. It has to exist on the broker.
func DeadLetterGroup(group string) string { return group + "-dlq" }

// DeadLetterConfig has the settings of [DeadLetters]. The zero value of each field means its default.
type DeadLetterConfig struct {
	// Retry is the pause after an error: the topic is not there before the first dead letter, so this is no fault. Default 10 s.
	Retry time.Duration
	// Timeout cuts off what is asked of the database. Default 10 s.
	Timeout time.Duration
	// Invisible is when a dead letter that could not be parked is tried again. 10 s to 12 h. Default 1 minute.
	Invisible time.Duration
	// Logger gets every dead letter, as an error. Default: nil, silent.
	Logger *slog.Logger
	// Registerer gets lapse_dead_letters_total. Default: nil, off.
	Registerer prometheus.Registerer
}

// DeadLetters watches the dead letters of a consumer group: each is counted, logged as an error with the ids of its orders, and moved
// to the parked messages, body and all. What is parked is acknowledged, so the broker keeps a dead letter until it is in the database.
// Its orders are not touched: they are overdue and stay so, in the metrics too, until reconcile or a person looks.
type DeadLetters struct {
	source Source
	parker Parker
	cfg    DeadLetterConfig
	count  prometheus.Counter
	ran    atomic.Bool
}

// NewDeadLetters makes a watcher; it does nothing before Run. The source reads [DeadLetterTopic] with [DeadLetterGroup]:
//
//	source, err := consumer.Connect(cfg, consumer.DeadLetterGroup(group), consumer.DeadLetterTopic(group))
func NewDeadLetters(source Source, parker Parker, cfg DeadLetterConfig) (*DeadLetters, error) {
	if source == nil || parker == nil {
		return nil, errors.New("new dead letter watcher: source and parker are required")
	}
	for _, d := range []struct {
		name string
		is   *time.Duration
		def  time.Duration
		min  time.Duration
	}{
		{"Retry", &cfg.Retry, 10 * time.Second, 1},
		{"Timeout", &cfg.Timeout, 10 * time.Second, 1},
		{"Invisible", &cfg.Invisible, time.Minute, 10 * time.Second},
	} {
		if *d.is == 0 {
			*d.is = d.def
		}
		if *d.is < d.min {
			return nil, fmt.Errorf("new dead letter watcher: %s is %s: must be at least %s", d.name, *d.is, d.min)
		}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r := &registering{to: cfg.Registerer}
	w := &DeadLetters{source: source, parker: parker, cfg: cfg,
		count: r.counter("lapse_dead_letters_total", "Timed messages that the broker gave up after all retries. One that could not be parked at once counts again.")}
	return w, errors.Join(r.errs...)
}

// Run works until ctx ends, and returns nil. It waits for the topic for as long as it takes.
func (w *DeadLetters) Run(ctx context.Context) error {
	if w.ran.Swap(true) {
		return errors.New("run dead letter watcher: it has run before; make another one")
	}
	for ctx.Err() == nil {
		// One at a time: dead letters are rare, and each waits for its transaction while it is hidden.
		ds, err := w.source.Receive(ctx, 1, w.cfg.Invisible)
		if ctx.Err() != nil {
			break // what came at the last moment shows again after its time
		}
		if err != nil {
			if !errors.Is(err, ErrNotReady) {
				w.cfg.Logger.Warn("dead letters cannot be received", "err", err)
			}
			sleep(ctx, w.cfg.Retry)
			continue
		}
		for _, d := range ds {
			if err := w.handle(ctx, d); err != nil {
				w.cfg.Logger.Error("a dead letter cannot be parked; the broker keeps it", "message", d.MessageID, "err", err)
				sleep(ctx, w.cfg.Retry)
			}
		}
	}
	return nil
}

func (w *DeadLetters) handle(ctx context.Context, d *Delivery) error {
	w.count.Inc()
	ids, reason := w.read(d)
	w.cfg.Logger.Error("dead letter: the broker gave a timed message up after all its retries",
		"orders", strings.Join(ids, ","), "message", d.MessageID, "topic", d.Topic, "due", d.DeliverAt, "reason", reason)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.cfg.Timeout)
	defer cancel()
	if err := w.parker.Park(ctx, orders.Parked{What: orders.ParkedMessage, Ref: d.MessageID, Reason: reason, Body: d.Body}); err != nil {
		return err
	}
	return w.source.Ack(ctx, d)
}

// read gives the ids of the orders in a dead letter: from its body, otherwise from its keys, which our relay fills with them in every
// version.
func (w *DeadLetters) read(d *Delivery) (ids []string, reason string) {
	reason = "dead letter of " + d.Topic
	defer func() {
		if v := recover(); v != nil {
			ids, reason = d.Keys, fmt.Sprintf("%s: decoding it panics: %v", reason, v)
		}
	}()
	e, err := orders.DecodeExpiry(d.Body)
	if err != nil {
		return d.Keys, fmt.Sprintf("%s: %v", reason, err)
	}
	return e.Orders, reason
}
