package orders

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"
	"gorm.io/gorm"

	"github.com/lapse-orders/lapse/migrations"
)

// Config has the settings of a [Store]. The zero value of each field means its default.
type Config struct {
	// Timeout is the time from placing to the deadline, for orders that name none. Default 30 minutes.
	Timeout time.Duration
	// Policies give other timeouts, or none, to orders of some channels and payment methods; the first that fits holds. Default: none.
	Policies []Policy
	// MaxLifetime caps every deadline, also an extended one, at this long after the order was placed. Default 7 days.
	MaxLifetime time.Duration
	// EarlyWait is how long before its deadline an order is reported as not due with nothing written, so that whoever asked can ask
	// again in that time. With more left, its outbox row is timed anew. Default 2 seconds.
	EarlyWait time.Duration
	// OutboxRetention is how long the outbox row of a sent message is kept. Default 48 hours.
	OutboxRetention time.Duration
	// KeyRetention is how long an idempotency key stands for its request; afterwards the same key places another order. Default 7 days.
	KeyRetention time.Duration
	// Events makes every change of an order's state also write a row of event_outbox, in the same transaction; a relay with events.topic
	// sends them. It has to be set alike in every process that works on the orders. Default false: nothing is written.
	Events bool
	// Retention says how long other rows are kept that nothing needs any longer.
	Retention Retention
	// CloseOnCancel writes, with each cancel by hand, the task that closes the order's payment page at the gateway ([TaskClose]). Somebody has
	// to work on the tasks: lapse refund does. Default: off.
	CloseOnCancel bool
	// MaxOpenConns bounds the pool of a store from [Open]. Default 16.
	MaxOpenConns int
	// DialTimeout and IOTimeout bound the connecting to the database and each read and write on the connection, for stores from
	// [Open] whose DSN does not say. Defaults 5 s and 30 s: without them a half-open connection blocks its caller for ever.
	DialTimeout, IOTimeout time.Duration
}

// WithDefaults gives the configuration with every zero field replaced by its default.
func (c Config) WithDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.Timeout, 30*time.Minute)
	def(&c.MaxLifetime, 7*24*time.Hour)
	def(&c.EarlyWait, 2*time.Second)
	def(&c.OutboxRetention, 48*time.Hour)
	def(&c.KeyRetention, 7*24*time.Hour)
	def(&c.Retention.Events, 7*24*time.Hour)
	def(&c.Retention.Parked, 90*24*time.Hour)
	def(&c.Retention.Runs, 90*24*time.Hour)
	def(&c.DialTimeout, 5*time.Second)
	def(&c.IOTimeout, 30*time.Second)
	if c.MaxOpenConns == 0 {
		c.MaxOpenConns = 16
	}
	return c
}

func (c Config) validate() error {
	for _, d := range []struct {
		name string
		is   time.Duration
	}{
		{"Timeout", c.Timeout}, {"MaxLifetime", c.MaxLifetime}, {"EarlyWait", c.EarlyWait},
		{"OutboxRetention", c.OutboxRetention}, {"KeyRetention", c.KeyRetention}, {"DialTimeout", c.DialTimeout}, {"IOTimeout", c.IOTimeout},
		{"Retention.Orders", c.Retention.Orders}, {"Retention.Events", c.Retention.Events}, {"Retention.Parked", c.Retention.Parked}, {"Retention.Runs", c.Retention.Runs},
	} {
		if d.is < 0 {
			return invalid("orders.Config.%s is %s; it must be positive", d.name, d.is)
		}
	}
	if c.MaxOpenConns < 0 {
		return invalid("orders.Config.MaxOpenConns is %d; it must be positive", c.MaxOpenConns)
	}
	if c.Timeout > c.MaxLifetime {
		return invalid("orders.Config.Timeout is %s, longer than MaxLifetime %s", c.Timeout, c.MaxLifetime)
	}
	if err := checkPolicies(c.Policies); err != nil {
		return fmt.Errorf("orders.Config.Policies: %w", err)
	}
	for _, p := range c.Policies {
		// Not their sum, which may overflow.
		if timeout := cmp.Or(p.Timeout, c.Timeout); !p.Never && (p.Grace > c.MaxLifetime || timeout > c.MaxLifetime-p.Grace) {
			return invalid("orders.Config.Policies: policy %q has its deadline %s and a grace of %s after placing, later than MaxLifetime %s", p, timeout, p.Grace, c.MaxLifetime)
		}
	}
	return nil
}

// Store is the database side of lapse. It is safe for concurrent use.
type Store struct {
	db     *sql.DB
	cfg    Config
	owned  bool
	retry  atomic.Int64
	gone   atomic.Int64
	parked atomic.Int64
}

// ConnLifetime is how long a store from [Open] keeps a connection: below the idle limits of common proxies and of wait_timeout, and a
// moved name is followed within minutes.
const ConnLifetime = 5 * time.Minute

// Open makes a store with a pool of its own. It checks the DSN (the form of github.com/go-sql-driver/mysql) and dials nothing: the
// database may come up later; [Store.Ready] tells. Every connection is set to READ COMMITTED, UTC and strict mode, whatever the DSN
// says, and is given up when the server turns out to be read-only, so that a name that leads to a new primary is asked again.
func Open(dsn string, cfg Config) (*Store, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	parsed, err := mysql.ParseDSN(dsn)
	if err != nil {
		// The driver's error may repeat the DSN, and the DSN has the password.
		return nil, invalid("the database's DSN cannot be read; expected user:password@tcp(host:port)/database")
	}
	if parsed.DBName == "" {
		return nil, invalid("the DSN for %s names no database; expected user:password@tcp(host:port)/database", parsed.Addr)
	}
	if parsed.Timeout == 0 {
		parsed.Timeout = cfg.DialTimeout
	}
	if parsed.ReadTimeout == 0 {
		parsed.ReadTimeout = cfg.IOTimeout
	}
	if parsed.WriteTimeout == 0 {
		parsed.WriteTimeout = cfg.IOTimeout
	}
	parsed.InterpolateParams = true // one round trip a statement instead of three, and no prepared statement left in the server
	parsed.RejectReadOnly = true
	parsed.Logger = &mysql.NopLogger{} // it would write to the standard error what the errors say anyway
	base, err := mysql.NewConnector(parsed)
	if err != nil {
		return nil, invalid("the database's DSN for %s is not usable: %v", parsed.Addr, err)
	}
	_, waitGiven := parsed.Params["innodb_lock_wait_timeout"]
	db := sql.OpenDB(&connector{Connector: base, keepLockWait: waitGiven})
	db.SetMaxOpenConns(cfg.MaxOpenConns)
	db.SetMaxIdleConns(cfg.MaxOpenConns)
	db.SetConnMaxLifetime(ConnLifetime)
	return &Store{db: db, cfg: cfg, owned: true}, nil
}

// New makes a store on the caller's gorm handle: its own transactions use that pool, each at READ COMMITTED. Close leaves the pool
// open.
func New(db *gorm.DB, cfg Config) (*Store, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	pool, err := db.DB()
	if err != nil {
		return nil, fmt.Errorf("find the connection pool of the gorm handle: %w", err)
	}
	return &Store{db: pool, cfg: cfg}, nil
}

// connector prepares each new connection. It is done here and not in the DSN since the isolation variable has two names (MariaDB
// before 11.1 knows only the old one), and SET SESSION TRANSACTION is understood by all.
type connector struct {
	driver.Connector
	keepLockWait bool
}

// lockWait is how long one statement waits for a row lock before it is retried; MySQL's default of 50 s outlasts every caller.
const lockWait = 5

// Connect implements driver.Connector.
func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	set := "SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO'"
	if !c.keepLockWait {
		set += fmt.Sprintf(", innodb_lock_wait_timeout = %d", lockWait)
	}
	exec, ok := conn.(driver.ExecerContext)
	if !ok {
		return nil, errors.Join(fmt.Errorf("prepare session: the driver's connection %T cannot execute", conn), conn.Close())
	}
	for _, statement := range []string{"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", set} {
		if _, err := exec.ExecContext(ctx, statement, nil); err != nil {
			return nil, errors.Join(fmt.Errorf("prepare session: %w", err), conn.Close())
		}
	}
	return conn, nil
}

// DB is the store's pool, for reads beside the verbs (metrics, health).
func (s *Store) DB() *sql.DB { return s.db }

// Timeout is the time from placing to the deadline of orders that name none.
func (s *Store) Timeout() time.Duration { return s.cfg.Timeout }

// EarlyWait is how long before its deadline an order is reported as not due with nothing written. Whoever asks has to wait up to
// as long.
func (s *Store) EarlyWait() time.Duration { return s.cfg.EarlyWait }

// Close closes the pool of a store from [Open]. Call it last: whoever still works on orders needs it.
func (s *Store) Close() error {
	if !s.owned {
		return nil
	}
	return s.db.Close()
}

// Counters are totals since the store was made.
type Counters struct {
	Retries      int64 // transactions that were started again after 1213, 1205, 1020, or a row count that did not fit
	StockMissing int64 // stock rows that were gone when an order's stock was to be moved
	Parked       int64 // orders, messages and payments that were parked
}

// Counters reads the totals.
func (s *Store) Counters() Counters {
	return Counters{Retries: s.retry.Load(), StockMissing: s.gone.Load(), Parked: s.parked.Load()}
}

// Ready asks the database whether the verbs can work on it: reachable, writable, at READ COMMITTED, and with the schema of this
// build or a newer one. The error names what is missing and what to do; [IsUnavailable] is true for it.
func (s *Store) Ready(ctx context.Context) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("connect to the database: %w: %w", errNotReady, err)
	}
	defer conn.Close()  //nolint:errcheck // the connection goes back to the pool; its fate is the pool's
	var readOnly string // a number, or a word in MariaDB 12
	if err := conn.QueryRowContext(ctx, "SELECT @@global.read_only").Scan(&readOnly); err != nil {
		return fmt.Errorf("ask the database whether it takes writes: %w: %w", errNotReady, err)
	}
	if readOnly != "0" && readOnly != "OFF" {
		return fmt.Errorf("%w: it is read-only; point the DSN at the primary", errNotReady)
	}
	var name, isolation string
	if err := conn.QueryRowContext(ctx, "SHOW SESSION VARIABLES WHERE Variable_name IN ('transaction_isolation', 'tx_isolation')").Scan(&name, &isolation); err != nil {
		return fmt.Errorf("ask the database for the isolation level: %w: %w", errNotReady, err)
	}
	if s.owned && isolation != "READ-COMMITTED" {
		return fmt.Errorf("%w: %s is %s and cannot be set to READ-COMMITTED; look for a proxy that resets sessions", errNotReady, name, isolation)
	}
	var version sql.NullInt64
	err = conn.QueryRowContext(ctx, "SELECT MAX(version_id) FROM "+migrations.Table+" WHERE is_applied").Scan(&version)
	switch {
	case number(err) == errNoSuchTable, number(err) == errTableRights, err == nil && !version.Valid:
		return fmt.Errorf("%w: it has no lapse tables; run \"lapse migrate up\"", errNotReady)
	case err != nil:
		return fmt.Errorf("read the schema version: %w: %w", errNotReady, err)
	case version.Int64 < migrations.Version:
		return fmt.Errorf("%w: its schema is version %d and this build needs %d; run \"lapse migrate up\"", errNotReady, version.Int64, migrations.Version)
	}
	return nil
}

// executor is what the verbs need of a connection: *sql.Tx, and what lies under a gorm handle in a transaction.
type executor interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// txn is one transaction, ours or the caller's, and its instant.
type txn struct {
	executor
	now time.Time
	// outgoing: Config.Events
	outgoing bool
	// counted after the commit, so that a transaction that runs twice counts once
	gone, parked int64
}

// errAgain makes inTx roll back and start from the beginning.
var errAgain = errors.New("rows changed under the transaction")

// maxAttempts of one transaction; with the pauses below it gives up after some two seconds of deadlocks.
const maxAttempts = 12

// inTx runs do in a transaction of its own and commits. It starts again on errors that say "run it again", after a pause with jitter.
// An error of the COMMIT itself has an unknown result and is returned: nothing may be assumed, whoever called asks again.
func (s *Store) inTx(ctx context.Context, doing string, do func(context.Context, *txn) error) error {
	for attempt := 1; ; attempt++ {
		err := s.once(ctx, do)
		if err == nil {
			return nil
		}
		if (!IsRetryable(err) && !errors.Is(err, errAgain)) || attempt == maxAttempts {
			return fmt.Errorf("%s: %w", doing, err)
		}
		s.retry.Add(1)
		pause := time.Duration(rand.Int64N(int64(min(10<<attempt, 300)))+1) * time.Millisecond //nolint:gosec // jitter needs no secrecy
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%s: %w after %d attempts, the last: %w", doing, ctx.Err(), attempt, err)
		case <-timer.C:
		}
	}
}

func (s *Store) once(ctx context.Context, do func(context.Context, *txn) error) error {
	options := &sql.TxOptions{}
	if !s.owned {
		options.Isolation = sql.LevelReadCommitted
	}
	tx, err := s.db.BeginTx(ctx, options)
	if err != nil {
		return fmt.Errorf("begin: %w: %w", errNotReady, err)
	}
	t := &txn{executor: tx, outgoing: s.cfg.Events}
	err = t.readNow(ctx)
	if err == nil {
		err = do(ctx, t)
	}
	if err != nil {
		// A rollback that fails means that the connection is gone, and the transaction with it.
		_ = tx.Rollback()
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit (its result is unknown; ask again): %w: %w", errNotReady, err)
	}
	s.gone.Add(t.gone)
	s.parked.Add(t.parked)
	return nil
}

// joinTx runs do inside the caller's transaction, between a savepoint and its release.
func (s *Store) joinTx(ctx context.Context, tx *gorm.DB, doing string, do func(context.Context, *txn) error) error {
	conn, err := connOf(tx)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if _, err := conn.ExecContext(ctx, "SAVEPOINT lapse_tx"); err != nil {
		return fmt.Errorf("%s: set savepoint: %w", doing, err)
	}
	// Outside a transaction a savepoint is taken without an error and is gone at once. That is where a handle stands whose transaction a
	// deadlock has ended while its owner went on: each statement of ours would be committed alone.
	if _, err := conn.ExecContext(ctx, "ROLLBACK TO SAVEPOINT lapse_tx"); err != nil {
		if number(err) == errNoSavepoint {
			return fmt.Errorf("%s: the handle's transaction was ended by the server (a deadlock, or a lost connection); start again: %w", doing, ErrNoTransaction)
		}
		return fmt.Errorf("%s: set savepoint: %w", doing, err)
	}
	t := &txn{executor: conn, outgoing: s.cfg.Events}
	err = t.readNow(ctx)
	if err == nil {
		err = do(ctx, t)
	}
	if err == nil {
		if _, err := conn.ExecContext(ctx, "RELEASE SAVEPOINT lapse_tx"); err != nil {
			return fmt.Errorf("%s: release savepoint: %w", doing, err)
		}
		// The caller may still roll back: these two are then counted though nothing happened, which an operator can bear.
		s.gone.Add(t.gone)
		s.parked.Add(t.parked)
		return nil
	}
	// After a deadlock the server has rolled back everything and is in autocommit: a statement of ours would be committed alone.
	if number(err) != errDeadlock {
		if _, back := conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK TO SAVEPOINT lapse_tx"); back != nil && number(back) != errNoSavepoint {
			return fmt.Errorf("%s: %w; and the savepoint cannot be restored, so roll back: %w", doing, err, back)
		}
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// connOf finds the plain connection under a gorm handle. gorm's own layers are passed by: its statement cache would keep one prepared
// statement for each length of an IN list, and its callbacks and table naming are the caller's.
func connOf(tx *gorm.DB) (executor, error) {
	if tx == nil || tx.Statement == nil {
		return nil, ErrNoTransaction
	}
	pool := tx.Statement.ConnPool
	if cached, ok := pool.(*gorm.PreparedStmtTX); ok {
		pool = cached.Tx
	}
	if _, ok := pool.(gorm.TxCommitter); !ok {
		return nil, fmt.Errorf("the gorm handle is %w: call it inside db.Transaction(…) with the handle given there", ErrNoTransaction)
	}
	return pool, nil
}

// readNow asks the database for the instant that the whole transaction uses. UTC_TIMESTAMP is the one that no session's time zone
// shifts.
func (t *txn) readNow(ctx context.Context) error {
	var now instant
	if err := t.QueryRowContext(ctx, "SELECT CAST(UTC_TIMESTAMP(3) AS CHAR)").Scan(&now); err != nil {
		return fmt.Errorf("ask the database for the time: %w: %w", errNotReady, err)
	}
	t.now = now.time
	return nil
}

// exec runs a statement and gives the number of rows that it touched.
func (t *txn) exec(ctx context.Context, query string, args ...any) (int64, error) {
	result, err := t.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// each runs a query and calls scan for every row.
func (t *txn) each(ctx context.Context, query string, args []any, scan func(*sql.Rows) error) error {
	return each(ctx, t, query, args, scan)
}

func each(ctx context.Context, db executor, query string, args []any, scan func(*sql.Rows) error) (err error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// marks gives n question marks for an IN list, and tuples n groups of them for VALUES.
func marks(n int) string { return strings.TrimSuffix(strings.Repeat("?,", n), ",") }

func tuples(n, width int) string {
	return strings.TrimSuffix(strings.Repeat("("+marks(width)+"),", n), ",")
}

func anys[T any](list []T) []any {
	args := make([]any, len(list))
	for i, v := range list {
		args[i] = v
	}
	return args
}

// newToken makes a lease token. It is random, so that a holder whose lease ended can never match a later one.
func newToken() string {
	var b [16]byte
	_, _ = crand.Read(b[:]) // never fails (crypto/rand, since Go 1.24)
	return hex.EncodeToString(b[:])
}
