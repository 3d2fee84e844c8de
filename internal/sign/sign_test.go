package sign_test

import (
	"errors"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/sign"
)

func TestASignatureFitsItsTimeItsSubjectAndItsBodyAlone(t *testing.T) {
	t.Parallel()
	const secret, old, path = "0123456789abcdef", "fedcba9876543210", "/orders/17/close"
	now, body := time.Unix(1796050800, 0), []byte(`{"order_id":"17"}`)
	good := sign.Sign(secret, now, path, body)
	for name, c := range map[string]struct {
		values   []string
		subject  string
		body     string
		now      time.Time
		mismatch bool
		refused  bool
	}{
		"good":                    {values: []string{good}},
		"by the other secret":     {values: []string{sign.Sign(old, now, path, body)}},
		"by an unknown secret":    {values: []string{sign.Sign("0123456789abcdeF", now, path, body)}, mismatch: true},
		"of another call":         {values: []string{good}, subject: "/orders/17/status", mismatch: true},
		"of another body":         {values: []string{good}, body: `{"order_id":"18"}`, mismatch: true},
		"with another time":       {values: []string{"t=1796050801" + good[len("t=1796050800"):]}, mismatch: true},
		"at the end of its time":  {values: []string{good}, now: now.Add(sign.Window)},
		"too old":                 {values: []string{good}, now: now.Add(sign.Window + time.Second), refused: true},
		"of the future":           {values: []string{good}, now: now.Add(-sign.Window - time.Second), refused: true},
		"none":                    {refused: true},
		"two":                     {values: []string{good, good}, refused: true},
		"rubbish":                 {values: []string{"v1=zz,t=soon"}, refused: true},
		"with a tail":             {values: []string{good + "zz"}, refused: true},
		"a time beyond all times": {values: []string{"t=99999999999999999999" + good[len("t=1796050800"):]}, refused: true},
	} {
		subject, content, at := path, body, now
		if c.subject != "" {
			subject = c.subject
		}
		if c.body != "" {
			content = []byte(c.body)
		}
		if !c.now.IsZero() {
			at = c.now
		}
		err := sign.Check(c.values, []string{secret, old}, subject, content, at)
		switch {
		case c.mismatch && !errors.Is(err, sign.ErrMismatch), c.refused && (err == nil || errors.Is(err, sign.ErrMismatch)), !c.mismatch && !c.refused && err != nil:
			t.Errorf("%s: %v", name, err)
		}
	}
}
