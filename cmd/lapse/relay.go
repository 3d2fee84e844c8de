package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/relay"
)

func (a *app) relayCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Turn outbox rows into timed messages, until told to stop",
		Long: `Turns the outbox rows that checkout commits with its orders into timed messages of RocketMQ. It runs until SIGTERM or
SIGINT. Several relays may run; they share the rows. With events.topic it also sends what changes with orders, and it
deletes what retention.* says may go. Database, tables, broker and topic may come up after it: it
waits, and /readyz names what is missing.

It works on the database as mysql.dsn_relay; without it, as mysql.dsn.`,
		Example: `  export LAPSE_MYSQL_DSN='lapse:secret@tcp(db:3306)/lapse'
  lapse relay --endpoints broker:8081
  lapse relay --config lapse.yaml --http-addr 0.0.0.0:9870 --log-format json
  lapse health relay`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			return a.serve(cmd, "relay", roleRelay, assembleRelay)
		}),
	}
	serviceFlags(cmd)
	return cmd
}

func assembleRelay(s *service) (*parts, error) {
	sender, err := relay.OpenSender(s.rocketmq(), s.cfg.RocketMQ.Topic)
	if err != nil {
		return nil, err
	}
	p := &parts{close: []func(context.Context) error{sender.Close}}
	r, err := relay.New(s.store, sender, s.relayConfig())
	if err != nil {
		return p, err
	}
	retention, err := newRetention(s)
	if err != nil {
		return p, err
	}
	p.run = []func(context.Context) error{r.Run, s.purgeKeys, retention.run}
	p.checks = []check{
		{name: checkBroker, ready: func(context.Context) error { return sender.Ready() }},
		{name: "relay", ready: func(context.Context) error { return r.Ready() }, loop: true},
	}
	if s.cfg.Events.Topic == "" {
		return p, nil
	}
	eventSender, err := relay.OpenEventSender(s.rocketmq(), s.cfg.Events.Topic)
	if err != nil {
		return p, err
	}
	p.close = append(p.close, eventSender.Close)
	events, err := relay.NewEvents(s.store, eventSender, s.eventsConfig())
	if err != nil {
		return p, err
	}
	p.run = append(p.run, events.Run)
	p.checks = append(p.checks, check{name: "events", ready: func(context.Context) error { return events.Ready() }, loop: true})
	return p, nil
}

func (s *service) eventsConfig() relay.EventsConfig {
	c := s.cfg.Relay
	return relay.EventsConfig{
		Topic:       s.cfg.Events.Topic,
		Source:      s.cfg.Events.Source,
		Lease:       c.Lease,
		SendTimeout: c.SendTimeout,
		Senders:     c.Senders,
		Poll:        c.Poll,
		BackoffMin:  c.BackoffMin,
		BackoffMax:  c.BackoffMax,
		PauseMax:    c.PauseMax,
		StopTimeout: s.drain(),
		Logger:      s.log,
		Registerer:  s.reg,
	}
}

// purgeKeys deletes the idempotency keys whose retention is over, until ctx ends. It is done here since the relay's account may delete and
// the API's may not.
func (s *service) purgeKeys(ctx context.Context) error {
	tick := time.NewTicker(s.cfg.Relay.PurgeInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		total := 0
		for ctx.Err() == nil {
			n, err := s.store.PurgeKeys(ctx, s.cfg.Relay.PurgeBatch)
			total += n
			if err != nil && ctx.Err() == nil {
				s.log.Warn("idempotency keys were not purged, will be tried again", "err", err)
			}
			if err != nil || n < s.cfg.Relay.PurgeBatch {
				break
			}
		}
		if total > 0 {
			s.log.Info("purged idempotency keys", "keys", total)
		}
	}
}

func (s *service) relayConfig() relay.Config {
	c := s.cfg.Relay
	return relay.Config{
		Topic:               s.cfg.RocketMQ.Topic,
		Tick:                c.Tick,
		MaxOrdersPerMessage: c.MaxOrdersPerMessage,
		Linger:              c.Linger,
		MaxDelay:            c.MaxDelay,
		Lease:               c.Lease,
		SendTimeout:         c.SendTimeout,
		ClaimLimit:          c.ClaimLimit,
		MaxInHand:           c.MaxInHand,
		Claimers:            c.Claimers,
		Senders:             c.Senders,
		Markers:             c.Markers,
		Poll:                c.Poll,
		BackoffMin:          c.BackoffMin,
		BackoffMax:          c.BackoffMax,
		PauseMax:            c.PauseMax,
		PurgeInterval:       c.PurgeInterval,
		PurgeBatch:          c.PurgeBatch,
		StopTimeout:         s.drain(),
		Logger:              s.log,
		Registerer:          s.reg,
	}
}
