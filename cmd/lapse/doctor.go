package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/ops"
)

func (a *app) doctorCmd() *cobra.Command {
	var asJSON, explain, list bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what is wrong with database, broker, replica, clocks and configuration",
		Long: `Looks at everything that lapse rests on, and says of each thing whether it is as it should be (✓), wrong (✗), or why
it could not be checked (–): the value found and, where it is wrong, why that matters and the command that mends it.
Run it before going live, after changes, and first of all when something is odd. It uses the same configuration as
the services, so run it where they run, with their environment.

It changes nothing, but sends messages to a topic of its own (doctor.topic) and takes them back; one for
relay.max_delay stays pending there. Topic and group are made if they are missing and rocketmq.admin_endpoint names
the broker; without that key the broker's settings and offsets are not checked. All checks run side by side, each
within doctor.timeout.

The exit code is 1 when something is wrong; what could not be checked does not change it.`,
		Example: `  lapse doctor
  lapse doctor --json | jq '.checks[] | select(.verdict == "wrong")'
  lapse doctor --set rocketmq.admin_endpoint=broker:10911 --explain
  lapse doctor --list   # every check, and why it matters`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			if list {
				return report{w: a.stdout, json: asJSON, list: true}.end(ops.Checks())
			}
			cfg, err := a.read(cmd) // what load would warn of is a check
			if err != nil {
				return err
			}
			r := report{w: a.stdout, json: asJSON, explain: explain}
			findings, err := ops.Doctor(cmd.Context(), cfg.doctor(), r.tell)
			if err != nil {
				return err
			}
			return r.end(findings)
		}),
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.BoolVar(&asJSON, "json", false, "print the findings as JSON")
	flags.BoolVar(&explain, "explain", false, "say of every check why it matters, not only of those that found something wrong")
	flags.BoolVar(&list, "list", false, "list the checks, and why they matter, and make none")
	return cmd
}

// doctor is the configuration as the doctor takes it.
func (e *effective) doctor() ops.DoctorConfig {
	s := &service{cfg: e}
	cfg := ops.DoctorConfig{
		Orders:        e.ordersConfig(),
		RocketMQ:      s.rocketmq(),
		Topic:         e.RocketMQ.Topic,
		Group:         e.RocketMQ.Group,
		AdminEndpoint: e.RocketMQ.AdminEndpoint,
		OwnTopic:      e.Doctor.Topic,
		OwnGroup:      e.Doctor.Group,
		Tick:          e.Relay.Tick,
		MaxDelay:      e.Relay.MaxDelay,
		EventsTopic:   e.Events.Topic,
		Replica:       e.MySQL.DSNReplica,
		MaxLag:        e.Reconcile.MaxLag,
		Unread:        e.unread,
		Timeout:       e.Doctor.Timeout,
	}
	cfg.RocketMQ.Registerer = nil // of a service; as an interface it is not nil
	own := 0
	add := func(role, key, dsn string, fallback bool) {
		if dsn != "" {
			own++
		} else if fallback {
			key, dsn = "mysql.dsn", e.MySQL.DSN
		}
		cfg.Accounts = append(cfg.Accounts, ops.Account{Role: role, Key: key, DSN: dsn})
	}
	cfg.Accounts = append(cfg.Accounts, ops.Account{Role: "api", Key: "mysql.dsn", DSN: e.MySQL.DSN})
	add("relay", "mysql.dsn_relay", e.MySQL.DSNRelay, true)
	add("consume", "mysql.dsn_consume", e.MySQL.DSNConsume, true)
	add("reconcile", "mysql.dsn_reconcile", e.MySQL.DSNReconcile, true)
	if e.Gateway.URL != "" || e.MySQL.DSNRefund != "" {
		add("refund", "mysql.dsn_refund", e.MySQL.DSNRefund, true)
	}
	add("read", "mysql.dsn_read", e.MySQL.DSNRead, false)
	// Where the roles have accounts of their own, mysql.dsn is the API's and has no business with tables.
	add("migrate", "mysql.dsn_migrate", e.MySQL.DSNMigrate, own == 0)
	return cfg
}

// report prints findings.
type report struct {
	w             io.Writer
	json, explain bool
	list          bool
}

// tell prints one finding as soon as it is there.
func (r report) tell(f ops.Finding) {
	if r.json {
		return
	}
	mark := map[ops.Verdict]string{ops.Sound: "✓", ops.Wrong: "✗", ops.NotChecked: "–"}[f.Verdict]
	found := f.Found
	if f.Verdict == ops.NotChecked {
		found = "not checked: " + found
	}
	fmt.Fprintf(r.w, "%s %-23s %s\n", mark, f.Name, printable(found))
	if r.explain || f.Verdict == ops.Wrong {
		fmt.Fprintf(r.w, "    why: %s\n", f.Why)
	}
	if f.Fix != "" {
		fmt.Fprintf(r.w, "    fix: %s\n", printable(f.Fix))
	}
}

// end prints what is left to say, and gives the error for the exit code.
func (r report) end(findings []ops.Finding) error {
	count := map[ops.Verdict]int{}
	for _, f := range findings {
		count[f.Verdict]++
	}
	switch {
	case r.json:
		enc := json.NewEncoder(r.w)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		if err := enc.Encode(struct {
			Sound      int           `json:"sound"`
			Wrong      int           `json:"wrong"`
			NotChecked int           `json:"not_checked"`
			Checks     []ops.Finding `json:"checks"`
		}{count[ops.Sound], count[ops.Wrong], count[ops.NotChecked], findings}); err != nil {
			return fmt.Errorf("print the findings: %w", err)
		}
	case r.list:
		for _, f := range findings {
			fmt.Fprintf(r.w, "%-23s %s\n", f.Name, f.Why)
		}
		return nil
	default:
		fmt.Fprintf(r.w, "\n%d sound, %d wrong, %d not checked\n", count[ops.Sound], count[ops.Wrong], count[ops.NotChecked])
	}
	if n := count[ops.Wrong]; n > 0 {
		return codeError{fmt.Errorf("%d of %d checks found something wrong", n, len(findings)), exitFailed}
	}
	return nil
}

// printable puts on one line what servers say, and keeps it from steering the terminal.
func printable(s string) string {
	return visible(strings.NewReplacer("\n", " ", "\t", " ").Replace(s))
}
