package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/consumer"
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
  lapse consume --config lapse.yaml --http-addr 127.0.0.1:9872   # a second one on this host
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
	c := s.cfg.Consumer
	worker, err := consumer.New(s.store, s.store, source, consumer.Config{
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
	})
	if err != nil {
		return p, err
	}
	dead, err := consumer.Connect(s.rocketmq(), consumer.DeadLetterGroup(group), consumer.DeadLetterTopic(group))
	if err != nil {
		return p, err
	}
	p.close = append(p.close, dead.Close)
	letters, err := consumer.NewDeadLetters(dead, s.store, consumer.DeadLetterConfig{Timeout: c.CancelTimeout, Logger: s.log, Registerer: s.reg})
	if err != nil {
		return p, err
	}
	p.run = []func(context.Context) error{worker.Run, letters.Run}
	p.checks = []check{
		{"broker", func(context.Context) error { return source.Ready() }},
		{"consumer", func(context.Context) error { return worker.Ready() }},
	}
	return p, nil
}
