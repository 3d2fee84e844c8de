package orders

import (
	"database/sql/driver"
	"fmt"
	"time"
)

// sqlLayout is how instants cross the driver: as text, in UTC. A time.Time would be shifted by the DSN's loc, and read back as
// bytes where parseTime is off; both belong to the caller in …Tx.
const sqlLayout = "2006-01-02 15:04:05.000"

// instant is a DATETIME(3) in UTC. Columns are selected as CAST(x AS CHAR), which no driver setting touches.
type instant struct {
	time  time.Time
	valid bool
}

func at(t time.Time) instant { return instant{time: t, valid: !t.IsZero()} }

// Value implements driver.Valuer.
func (i instant) Value() (driver.Value, error) {
	if !i.valid {
		return nil, nil
	}
	return i.time.UTC().Truncate(time.Millisecond).Format(sqlLayout), nil
}

// Scan implements sql.Scanner.
func (i *instant) Scan(src any) error {
	var text string
	switch v := src.(type) {
	case nil:
		*i = instant{}
		return nil
	case []byte:
		text = string(v)
	case string:
		text = v
	default:
		return fmt.Errorf("read instant: unexpected type %T", src)
	}
	t, err := time.ParseInLocation("2006-01-02 15:04:05.999", text, time.UTC)
	if err != nil {
		return fmt.Errorf("read instant %q: %w", text, err)
	}
	*i = instant{time: t, valid: true}
	return nil
}

func (i instant) pointer() *time.Time {
	if !i.valid {
		return nil
	}
	t := i.time
	return &t
}
