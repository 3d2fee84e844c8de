package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/orders"
)

func (a *app) cancelCmd() *cobra.Command {
	var reason, actor string
	cmd := &cobra.Command{
		Use:   "cancel ORDER --reason TEXT",
		Short: "Cancel one unpaid order by hand, whatever its deadline",
		Long: `Cancels one unpaid order by hand, whatever its deadline, and gives its stock back exactly as a timeout does. Reason and
actor stay with the order. An order that is cancelled already is left as it is, which is no failure; a paid one
is never cancelled.`,
		Example: `  lapse cancel 7291823345664 --reason 'customer asked by phone'
  lapse cancel 7291823345664 --reason 'fraud, ticket 812' --actor alice`,
		Args: a.exactly("ORDER"),
		RunE: a.begin(func(cmd *cobra.Command, args []string) error {
			id, err := orders.ParseID(args[0])
			if err != nil {
				return usageError{err}
			}
			if strings.TrimSpace(reason) == "" {
				return usage("cancel needs --reason: it stays with the order, for whoever asks later")
			}
			actor = a.actor(actor)
			cfg, err := a.load(cmd)
			if err != nil {
				return err
			}
			store, err := a.open(cfg, roleAPI)
			if err != nil {
				return err
			}
			out, err := store.Cancel(cmd.Context(), id, actor, reason)
			if err = errors.Join(err, store.Close()); err != nil {
				if errors.Is(err, orders.ErrInvalid) {
					return usageError{err}
				}
				return err
			}
			switch out.Result {
			case orders.ResultCancelled:
				fmt.Fprintf(a.stdout, "order %d is cancelled, its stock is released\n", id)
			case orders.ResultAlreadyCancelled:
				fmt.Fprintf(a.stdout, "order %d was cancelled before; nothing changed\n", id)
			case orders.ResultAlreadyPaid:
				return fmt.Errorf("order %d is paid, and stays so; a refund is the gateway's business", id)
			case orders.ResultNotFound:
				return fmt.Errorf("there is no order %d", id)
			default:
				return fmt.Errorf("order %d is not cancelled: %s", id, out.Result)
			}
			return nil
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, in your own `text`; required")
	cmd.Flags().StringVar(&actor, "actor", "", "who, as it shall stand in the order's story; default cli:$USER")
	return cmd
}

// actor is who acts, as it stands in the stories of orders: as was said, or the user of the command line.
func (a *app) actor(said string) string {
	if said != "" {
		return said
	}
	if user := strings.TrimSpace(a.getenv("USER")); user != "" {
		return "cli:" + user
	}
	return "cli"
}

// open makes the store of a role. It dials nothing.
func (a *app) open(cfg *effective, r role) (*orders.Store, error) {
	dsn, err := cfg.dsn(r)
	if err != nil {
		return nil, err
	}
	store, err := orders.Open(dsn, cfg.ordersConfig())
	if err != nil {
		return nil, &configError{[]error{err}}
	}
	return store, nil
}

func (e *effective) ordersConfig() orders.Config {
	return orders.Config{
		Timeout:         e.Orders.Timeout,
		Policies:        e.policies,
		MaxLifetime:     e.Orders.MaxLifetime,
		EarlyWait:       e.Consumer.EarlyWait,
		CloseOnCancel:   e.Gateway.URL != "",
		OutboxRetention: e.Outbox.Retention,
		KeyRetention:    e.Orders.KeyRetention,
		Events:          e.Events.Topic != "",
		Retention:       orders.Retention{Orders: e.Retention.Orders, Events: e.Retention.Events, Parked: e.Retention.Parked, Runs: e.Retention.Runs},
		MaxOpenConns:    e.MySQL.MaxOpenConns,
		DialTimeout:     e.MySQL.DialTimeout,
		IOTimeout:       e.MySQL.IOTimeout,
	}
}
