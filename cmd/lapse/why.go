package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/ops/why"
	"github.com/lapse-orders/lapse/orders"
)

func (a *app) whyCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "why ORDER",
		Short: "Say why an order is as it is, and what happened to it in time",
		Long: `Says in a sentence why an order is cancelled, or is not, and what to do where something is wrong; then everything that
the database knows of it in time: placed, deadline, its timed message, payments, refunds, holds, what was parked, and
what cancelled it. What lies ahead is marked with >. Times are UTC, amounts minor units.

A consumer that receives a message leaves no trace but what it then does; where nothing shows that a message was
received, it says so.

It only reads, as mysql.dsn_read (without it, as mysql.dsn). A replica will do; it may be behind, which is then said.
The exit code is 1 where there is no such order.`,
		Example: `  lapse why 7291823345664
  lapse why 7291823345664 --json | jq -r .cause`,
		Args: a.exactly("ORDER"),
		RunE: a.begin(func(cmd *cobra.Command, args []string) error {
			id, err := orders.ParseID(args[0])
			if err != nil {
				return usageError{err}
			}
			var answer why.Answer
			err = a.withStore(cmd, roleRead, func(store *orders.Store) error {
				story, err := store.ReadStory(cmd.Context(), id)
				if err == nil {
					answer = why.Tell(story)
				}
				return err
			})
			if err != nil {
				return err
			}
			if asJSON {
				if err := a.writeJSON(answer); err != nil {
					return err
				}
			} else if answer.Order != nil || len(answer.Entries) > 0 {
				a.printAnswer(answer)
			}
			switch {
			case answer.Order == nil && answer.ReadOnly:
				return fmt.Errorf("there is no order %d on this server, a replica, which may be behind", id)
			case answer.Order == nil:
				return fmt.Errorf("there is no order %d", id)
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the answer as JSON, as GET /v1/orders/ORDER/why does")
	return cmd
}

func (a *app) printAnswer(answer why.Answer) {
	p := a.page()
	fmt.Fprintln(a.stdout, p.strong(p.fold(visible(answer.Answer), 0)))
	if answer.Next != "" {
		fmt.Fprintf(a.stdout, "Next: %s\n", p.fold(visible(answer.Next), len("Next: ")))
	}
	head := fmt.Sprintf("order %d", answer.OrderID)
	if o := answer.Order; o != nil {
		head += fmt.Sprintf(": %s, %d %s (minor units)", o.Status, o.Amount, o.Currency)
		if o.Channel != "" {
			head += ", channel " + o.Channel
		}
		if o.UserID != "" {
			head += ", user " + o.UserID
		}
	}
	clock := "as of " + answer.At.UTC().Format("2006-01-02 15:04:05.000 UTC") + " by the database's clock"
	if answer.ReadOnly {
		clock += "; the server takes no writes, so it is a replica, and may be behind"
	}
	fmt.Fprintf(a.stdout, "\n%s\n%s\n", p.fold(visible(head), 0), p.fold(clock, 0))
	kinds, actors := 0, 0
	for _, e := range answer.Entries {
		kinds, actors = max(kinds, len(e.Kind)), max(actors, columns(visible(e.Actor)))
	}
	for _, e := range answer.Entries {
		mark := " "
		if e.Ahead {
			mark = ">"
		}
		row := fmt.Sprintf("%s %s  %s  %s  ", mark, e.At.UTC().Format("2006-01-02 15:04:05.000"), pad(visible(e.Kind), kinds), pad(visible(e.Actor), actors))
		fmt.Fprintln(a.stdout, strings.TrimRight(row+p.fold(visible(e.Text), columns(row)), " "))
	}
}
