package main

import (
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/migrations"
	"github.com/lapse-orders/lapse/orders"
)

// migrateIOTimeout is the limit of one statement of a migration, where the DSN has none. DDL on a large table takes hours at worst, and the
// lock of another migration is waited for in one statement; mysql.io_timeout would cut both off.
const migrateIOTimeout = 24 * time.Hour

// unknownDatabase is the server's error for a database that does not exist.
const unknownDatabase = 1049

func (a *app) migrateCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate COMMAND",
		Short: "Bring the tables up or down to a version, or show where they are",
		Long: `Brings the tables of lapse up or down to a version, or shows where they are. It works as mysql.dsn_migrate, an
account that may create tables; without it, as mysql.dsn. The database itself has to exist.`,
		Example: `  lapse migrate up
  lapse migrate status
  lapse migrate down --to 0 --yes`,
		Args: cobra.ArbitraryArgs,
		RunE: a.group,
	}
	up := &cobra.Command{
		Use:   "up",
		Short: "Apply what is pending",
		Long: `Applies every pending migration. It may run at every start of a deployment and from several machines at once: they
wait for one another, and where nothing is pending nothing happens.`,
		Example: "  lapse migrate up",
		Args:    a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			return a.migrate(cmd, func(store *orders.Store) error {
				done, err := migrations.Up(cmd.Context(), store.DB())
				for _, name := range done {
					fmt.Fprintf(a.stdout, "applied %s\n", name)
				}
				if err != nil {
					return err
				}
				all, err := migrations.Status(cmd.Context(), store.DB())
				if err != nil {
					return err
				}
				newest := all[len(all)-1].Version
				fmt.Fprintf(a.stdout, "the schema is at version %d\n", newest)
				if newest > migrations.Version {
					fmt.Fprintf(a.stdout, "a newer build made it: this one knows versions up to %d, and works on the one after that\n", migrations.Version)
				}
				return nil
			})
		}),
	}

	var to int64
	var yes bool
	down := &cobra.Command{
		Use:   "down --to VERSION --yes",
		Short: "Take migrations back, and the data with them",
		Long: `Takes back every migration after VERSION, newest first. The tables that they made are dropped with all that is in
them; --to 0 drops everything of lapse. Stop all relays and consumers first.`,
		Example: `  lapse migrate status
  lapse migrate down --to 10 --yes`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("to") {
				return usage("down needs --to VERSION; 'lapse migrate status' lists them")
			}
			if to < 0 || to > migrations.Version {
				return usage("--to %d: versions are 0 (nothing) to %d", to, migrations.Version)
			}
			if !yes {
				return usage("down drops the tables of the versions after %d with all their data; say --yes if that is meant", to)
			}
			return a.migrate(cmd, func(store *orders.Store) error {
				done, err := migrations.Down(cmd.Context(), store.DB(), to)
				for _, name := range done {
					fmt.Fprintf(a.stdout, "took back %s\n", name)
				}
				if err != nil {
					return err
				}
				fmt.Fprintf(a.stdout, "the schema is at version %d\n", to)
				return nil
			})
		}),
	}
	down.Flags().Int64Var(&to, "to", 0, "the `version` that shall remain; required")
	down.Flags().BoolVar(&yes, "yes", false, "the data of the dropped tables may go; required")

	status := &cobra.Command{
		Use:     "status",
		Short:   "List the migrations, and which are applied",
		Long:    "Lists the migrations of this binary, and which of them are applied to the database.",
		Example: "  lapse migrate status",
		Args:    a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			return a.migrate(cmd, func(store *orders.Store) error {
				all, err := migrations.Status(cmd.Context(), store.DB())
				if err != nil {
					return err
				}
				w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
				fmt.Fprintln(w, "VERSION\tMIGRATION\tAPPLIED")
				pending := 0
				for _, m := range all {
					at := "pending"
					if !m.At.IsZero() {
						at = m.At.Format("2006-01-02 15:04:05")
					} else {
						pending++
					}
					fmt.Fprintf(w, "%d\t%s\t%s\n", m.Version, m.Name, at)
				}
				if err := w.Flush(); err != nil {
					return err
				}
				if pending > 0 {
					fmt.Fprintf(a.stdout, "%d pending; apply them with 'lapse migrate up'\n", pending)
				}
				return nil
			})
		}),
	}
	cmd.AddCommand(up, down, status)
	return cmd
}

// migrate opens the database as the role that may change tables.
func (a *app) migrate(cmd *cobra.Command, do func(*orders.Store) error) error {
	cfg, err := a.load(cmd)
	if err != nil {
		return err
	}
	dsn, err := cfg.dsn(roleMigrate)
	if err != nil {
		return err
	}
	parsed, err := mysql.ParseDSN(dsn)
	if err != nil {
		return &configError{[]error{errors.New("the database's DSN cannot be read")}} // it was read before, by load
	}
	parsed.ParseTime = true // the migration library reads its own table's times as such
	// Two connections: the lock of migrations is held on one of its own.
	store, err := orders.Open(parsed.FormatDSN(), orders.Config{MaxOpenConns: 2, DialTimeout: cfg.MySQL.DialTimeout, IOTimeout: migrateIOTimeout})
	if err != nil {
		return &configError{[]error{err}}
	}
	err = do(store)
	if my, ok := errors.AsType[*mysql.MySQLError](err); ok && my.Number == unknownDatabase {
		err = fmt.Errorf("%w; create it first: CREATE DATABASE `%s`", err, parsed.DBName)
	}
	return errors.Join(err, store.Close())
}
