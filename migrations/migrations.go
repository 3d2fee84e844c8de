package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
)

// Table is where the applied versions are kept. It is not goose's default name: a shop's own migrations may use that one in the
// same database.
const Table = "lapse_schema_version"

// Version is the schema version that this build was made for: the number of the newest embedded file. Numbers rise and may have gaps.
const Version = 44

// lockWait bounds the wait for another deployment's migration. DDL on big tables takes minutes, not hours.
const lockWait = 5 * time.Minute

// lockPoll is how long one statement waits for the lock: less than any read timeout that a DSN may sensibly set.
const lockPoll = 2 * time.Second

//go:embed sql/*.sql
var files embed.FS

// ErrLocked is returned by Up and Down when another migration held the lock for five minutes, or until the context ended.
var ErrLocked = errors.New("another migration is running")

// Applied is one version and when it was applied; a zero time says that it is pending.
type Applied struct {
	Version int64
	Name    string
	At      time.Time
}

// Up applies every pending migration and returns the names of those it applied, oldest first. It is safe to call from several
// processes: they wait for each other. The session needs CREATE, ALTER, INDEX and DROP on its database; the pool must allow two
// connections. A schema that is newer than this build is left as it is.
func Up(ctx context.Context, db *sql.DB) ([]string, error) {
	return locked(ctx, db, func(p *goose.Provider) ([]string, error) {
		results, err := p.Up(ctx)
		return names(results), explain("apply migrations", err)
	})
}

// Down takes back migrations until the schema is at version target; 0 takes back all of them, and the data with them. A schema that is
// newer than this build is refused: what the newer build added rests on what this one knows.
func Down(ctx context.Context, db *sql.DB, target int64) ([]string, error) {
	return locked(ctx, db, func(p *goose.Provider) ([]string, error) {
		at, err := applied(ctx, db)
		if err != nil {
			return nil, err
		}
		for version := range at {
			if version > Version {
				return nil, fmt.Errorf("take back migrations: the schema has version %d and this build ends at %d; use the build that applied it", version, Version)
			}
		}
		results, err := p.DownTo(ctx, target)
		return names(results), explain("take back migrations", err)
	})
}

// Status lists every embedded migration, oldest first, and when it was applied; behind them those that a newer build has applied.
// It writes nothing.
func Status(ctx context.Context, db *sql.DB) ([]Applied, error) {
	p, err := provider(db)
	if err != nil {
		return nil, err
	}
	at, err := applied(ctx, db)
	if err != nil {
		return nil, err
	}
	var list []Applied
	for _, s := range p.ListSources() {
		list = append(list, Applied{Version: s.Version, Name: s.Path, At: at[s.Version]})
	}
	for _, version := range slices.Sorted(maps.Keys(at)) {
		if version > Version {
			list = append(list, Applied{Version: version, Name: "(of a newer build)", At: at[version]})
		}
	}
	return list, nil
}

// applied reads when each version was applied. goose reads its table too, but only from pools with parseTime, and in the zone of the
// session.
func applied(ctx context.Context, db *sql.DB) (_ map[int64]time.Time, err error) {
	at := map[int64]time.Time{}
	rows, err := db.QueryContext(ctx, "SELECT version_id, UNIX_TIMESTAMP(tstamp) FROM "+Table+" WHERE is_applied AND version_id > 0")
	var my *mysql.MySQLError
	if errors.As(err, &my) && my.Number == 1146 { // no such table: nothing was applied
		return at, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read schema version: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var version int64
		var seconds float64
		if err := rows.Scan(&version, &seconds); err != nil {
			return nil, fmt.Errorf("read schema version: %w", err)
		}
		at[version] = time.Unix(int64(seconds), 0).UTC()
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read schema version: %w", err)
	}
	return at, nil
}

func provider(db *sql.DB) (*goose.Provider, error) {
	dir, err := fs.Sub(files, "sql")
	if err != nil {
		return nil, fmt.Errorf("open embedded migrations: %w", err)
	}
	store, err := database.NewStore(database.DialectMySQL, Table)
	if err != nil {
		return nil, fmt.Errorf("open version table %s: %w", Table, err)
	}
	p, err := goose.NewProvider(database.DialectCustom, db, dir, goose.WithStore(store))
	if err != nil {
		return nil, fmt.Errorf("read embedded migrations: %w", err)
	}
	return p, nil
}

// locked runs do while holding a named lock of the database on a connection of its own: GET_LOCK belongs to one session, and
// goose takes whatever connection the pool gives it.
func locked(ctx context.Context, db *sql.DB, do func(*goose.Provider) ([]string, error)) (_ []string, err error) {
	p, err := provider(db)
	if err != nil {
		return nil, err
	}
	if db.Stats().MaxOpenConnections == 1 {
		return nil, errors.New("take the migration lock: it needs a connection beside the one that migrates; allow the pool two")
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to migrate: %w", err)
	}
	defer conn.Close() //nolint:errcheck // the lock goes with the session whatever Close says
	if err := lock(ctx, conn); err != nil {
		return nil, fmt.Errorf("take the migration lock: %w", err)
	}
	defer func() {
		_, unlockErr := conn.ExecContext(context.WithoutCancel(ctx), "DO RELEASE_LOCK(LEFT(CONCAT('lapse.migrate.', DATABASE()), 64))")
		if err == nil && unlockErr != nil {
			err = fmt.Errorf("release the migration lock: %w", unlockErr)
		}
	}()
	return do(p)
}

// lock waits for the named lock. The name carries the database: the lock is one for the whole server.
func lock(ctx context.Context, conn *sql.Conn) error {
	refused := false
	for began := time.Now(); ; {
		var got sql.NullInt64
		err := conn.QueryRowContext(ctx, "SELECT GET_LOCK(LEFT(CONCAT('lapse.migrate.', DATABASE()), 64), ?)", int(lockPoll.Seconds())).Scan(&got)
		switch {
		case refused && ctx.Err() != nil:
			return fmt.Errorf("%w (look for it with SHOW PROCESSLIST): %w", ErrLocked, ctx.Err())
		case err != nil:
			return err
		case !got.Valid:
			return errors.New("the DSN names no database")
		case got.Int64 == 1:
			return nil
		case time.Since(began) > lockWait:
			return fmt.Errorf("%w for more than %s; look for it with SHOW PROCESSLIST", ErrLocked, lockWait)
		}
		refused = true
	}
}

func names(results []*goose.MigrationResult) []string {
	list := make([]string, 0, len(results))
	for _, r := range results {
		list = append(list, r.Source.Path)
	}
	return list
}

func explain(doing string, err error) error {
	if err == nil {
		return nil
	}
	var partial *goose.PartialError
	if errors.As(err, &partial) && partial.Failed != nil {
		return fmt.Errorf("%s: %s failed after %d were done (each file is one statement, so nothing of it is left; mend the cause and run it again): %w",
			doing, partial.Failed.Source.Path, len(partial.Applied), err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
