"""`python -m trainer`, and torchrun -m trainer: hstrain where no script of that name is on the path."""
from trainer.cli import main

if __name__ == "__main__":
    main()
