package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/consumer"
	"github.com/lapse-orders/lapse/internal/rmq"
)

func (a *app) consumeCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "consume",
		Short: "Cancel what is due when its timed message arrives, until told to stop",
		Long: `Receives timed messages and cancels the orders in them that are due and still unpaid; their stock is given back in the
same transaction. It runs until SIGTERM or SIGINT. Several consumers of a group share the messages. Database,
tables, broker, topic and group may come up after it: it waits, and /readyz names what is missing.

It also watches the dead letters of the group: what the broker gave up is counted, logged and parked.

It works on the database as mysql.dsn_consume; without it, as mysql.dsn.`,
		Example: `  export LAPSE_MYSQL_DSN='lapse:secret@tcp(db:3306)/lapse'
  lapse consume --endpoints broker:8081
  lapse consume --config lapse.yaml --http-addr 127.0.0.1:9881   # a second one on this host
  lapse health consume`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			return a.serve(cmd, "consume", roleConsume, assembleConsumer)
		}),
	}
	serviceFlags(cmd)
	cmd.Flags().String("group", "", "consumer `group` (key rocketmq.group)")
	return cmd
}

func assembleConsumer(s *service) (*parts, error) {
	group, topic := s.cfg.RocketMQ.Group, s.cfg.RocketMQ.Topic
	p := &parts{}
	source, err := consumer.Connect(s.rocketmq(), group, topic)
	if err != nil {
		return nil, err
	}
	p.close = append(p.close, source.Close)
	cancels, err := s.canceller()
	if err != nil {
		return p, err
	}
	worker, err := consumer.New(cancels, s.store, source, s.consumerConfig())
	if err != nil {
		return p, err
	}
	deadBroker := s.rocketmq()
	deadBroker.Logger = slog.New(untilFirstDeadLetter{s.log.Handler()})
	dead, err := consumer.Connect(deadBroker, consumer.DeadLetterGroup(group), consumer.DeadLetterTopic(group))
	if err != nil {
		return p, err
	}
	p.close = append(p.close, dead.Close)
	letters, err := consumer.NewDeadLetters(dead, s.store, consumer.DeadLetterConfig{Timeout: s.cfg.Consumer.CancelTimeout, Logger: s.log, Registerer: s.reg})
	if err != nil {
		return p, err
	}
	p.run = []func(context.Context) error{worker.Run, letters.Run}
	p.checks = []check{
		{name: checkBroker, ready: func(context.Context) error { return source.Ready() }},
		{name: "consumer", ready: func(context.Context) error { return worker.Ready() }, loop: true},
	}
	return p, nil
}

func (s *service) consumerConfig() consumer.Config {
	c := s.cfg.Consumer
	return consumer.Config{
		BatchOrders:       c.BatchOrders,
		BatchWait:         c.BatchWait,
		Workers:           c.Workers,
		MaxInHand:         c.MaxInHand,
		EarlyWait:         c.EarlyWait,
		Receivers:         c.Receivers,
		MaxMessages:       c.MaxMessages,
		Invisible:         c.Invisible,
		CancelTimeout:     c.CancelTimeout,
		Ackers:            c.Ackers,
		ShutdownGrace:     s.drain(),
		NewerVersionDelay: c.NewerVersionDelay,
		BackoffMin:        c.BackoffMin,
		BackoffMax:        c.BackoffMax,
		GiveUpAfter:       c.GiveUpAfter,
		Logger:            s.log,
		Registerer:        s.reg,
	}
}

// topicNotFound is the code of the RocketMQ 5 protocol for a topic that is not there.
const topicNotFound = 40402

// untilFirstDeadLetter takes the log of the connection to the dead letters. The broker makes their topic for the first one, so that it is
// missing is how it should be, and a warning at every start, with advice to create it, would be a lie. A missing group stays a warning.
type untilFirstDeadLetter struct{ slog.Handler }

// Handle implements slog.Handler.
func (h untilFirstDeadLetter) Handle(ctx context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		err, isErr := a.Value.Any().(error)
		if code, refused := rmq.Code(err); isErr && refused && code == topicNotFound {
			r.Level = slog.LevelDebug
		}
		return true
	})
	if !h.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h untilFirstDeadLetter) WithAttrs(attrs []slog.Attr) slog.Handler {
	return untilFirstDeadLetter{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h untilFirstDeadLetter) WithGroup(name string) slog.Handler {
	return untilFirstDeadLetter{h.Handler.WithGroup(name)}
}
